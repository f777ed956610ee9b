"""Measuring and reporting."""
