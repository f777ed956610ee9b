"""Flat layout of a unit: where its parameters lie, and which rows of them a rank holds.

``row_planner`` chooses starts and the shard size, ``flat_layout`` cuts tensors accordingly.
"""
