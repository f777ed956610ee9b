"""Flat parameters and units: layout, storage, views, gradients, training state.

A unit knows how things are done; when they are done is decided in ``eager`` and ``graph_path``.
Imports: ``comm``.
"""
