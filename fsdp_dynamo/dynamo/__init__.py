"""Dynamo's private API, and the artifacts of its trace log."""
