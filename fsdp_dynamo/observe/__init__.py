"""``explain()``, ``inspect_graphs()`` and graph breaks; no other folder imports this one.

Imports: any folder of the library itself.
"""
