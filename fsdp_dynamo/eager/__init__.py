"""The root's schedule and the hooks around each unit's forward, for eager and hooks mode."""
