"""Process groups, collectives and what watches them; knows tensors and ranks, not units.

Imports: ``errors`` and ``events``.
"""
