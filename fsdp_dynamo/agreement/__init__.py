"""Ranks that compare what they are about to run, through the store that they share.

Imports: ``comm``.
"""
