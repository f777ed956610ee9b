"""Ranks that compare their graphs, options and collectives through the store; flight records.

Imports: ``comm``.
"""
