"""Measuring of ``benchmarks/models.py``: cells, ranks, comparison, record and tables."""
