"""Integrations with other libraries; nothing else in the package imports them."""
