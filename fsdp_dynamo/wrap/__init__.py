"""From a module and the user's arguments to units: the wrapper and ``fully_shard``.

Imports: all folders above except ``observe``.
"""
