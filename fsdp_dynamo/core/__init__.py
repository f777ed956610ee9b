"""Units and their flat parameters: layout, storage, views, gradients, training state.

A unit implements each action; ``eager`` and ``graph_mode`` decide when it runs.
"""
