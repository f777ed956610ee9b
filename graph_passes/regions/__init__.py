"""Equal unit bodies as regions: graphs that are compiled once for all their calls."""
