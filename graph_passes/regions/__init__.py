"""Regions: equal unit bodies as graphs that are compiled once for all their calls."""
