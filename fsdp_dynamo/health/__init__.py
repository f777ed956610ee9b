"""Comparison of graphs, options and collectives between ranks; failure notices; flight records."""
