"""Process groups, collectives, their log and watchdog; knows tensors and ranks, not units."""
