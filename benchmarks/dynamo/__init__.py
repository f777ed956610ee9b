"""Dynamo's distributed benchmark harness."""
