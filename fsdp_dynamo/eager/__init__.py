"""The root's schedule and the hooks around each unit's forward: eager mode, and hooks mode's
collectives.

Imports: ``core``, ``agreement``.
"""
