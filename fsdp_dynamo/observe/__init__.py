"""``explain()``, ``inspect_graphs()`` and graph breaks."""
