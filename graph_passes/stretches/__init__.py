"""Stretches of compute between the boundaries of a scheduled graph, each a graph of its own."""
