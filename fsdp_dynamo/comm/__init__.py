"""Process groups, collectives and their watchdog; knows tensors and ranks, not units.

Imports: ``errors`` and ``events``.
"""
