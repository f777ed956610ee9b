"""The root's schedule and the hooks around each unit's forward, of eager and hooks mode.

Imports: ``core``, ``agreement``.
"""
