"""Tests that need two hosts on one machine."""

from __future__ import annotations

import pytest

from benchmarks import link
from benchmarks.command_line import BadInputError

needs_link = pytest.mark.usefixtures("two_namespaces")


def why_there_is_no_link() -> str | None:
    """Why no link can be made here, or ``None``; making one is the only sure test."""
    try:
        link.check_can_link()
        with link.two_hosts(link.Shape()):
            return None
    except BadInputError as error:
        return str(error)
