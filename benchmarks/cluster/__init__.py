"""A simulated cluster: one process stands for rank 0 of many."""
