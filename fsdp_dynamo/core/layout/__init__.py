"""Flat layout of a unit: where its parameters lie, and which rows of them a rank holds."""
