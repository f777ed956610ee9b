"""Passes by which gradients are written into the flat gradient that is reduced."""
