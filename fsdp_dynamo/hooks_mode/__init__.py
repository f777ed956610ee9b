"""Hooks mode: compiled bodies between hooks that run eagerly."""
