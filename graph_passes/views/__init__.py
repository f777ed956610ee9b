"""Passes over the views of unsharded flat parameters."""
