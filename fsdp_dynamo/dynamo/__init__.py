"""All uses of Dynamo's private API, and what traced code needs to find units.

Imports: ``errors``.
"""
