"""Graph mode: collectives as nodes of one graph, ordered by ``graph_passes``."""
