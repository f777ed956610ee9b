"""How the harness refuses bad input: one line, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 2


class BadInputError(Exception):
    """Something that the caller can mend: what was expected, what was got, what to do."""


@contextmanager
def one_line_on_bad_input() -> Iterator[None]:
    """Turn a ``BadInputError`` into one line on standard error and exit code 2."""
    try:
        yield
    except BadInputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None
