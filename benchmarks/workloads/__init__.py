"""Workloads of the benchmarks."""
