"""Comparison of graphs, options and collectives between ranks through the store; flight records."""
