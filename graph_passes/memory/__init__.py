"""Bytes that a graph keeps alive: which storages there are, and from when to when."""
