"""Campaigns: random programs, random faults, and long runs; each is a command that writes JSON.

They use the ranks and models of tests/support, where smaller versions of them run as tests.
"""
