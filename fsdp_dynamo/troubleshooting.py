"""The troubleshooting page, to which errors refer, in the terminal.

python -m fsdp_dynamo.troubleshooting              # all headings
python -m fsdp_dynamo.troubleshooting wrapped-twice
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).with_name("troubleshooting.md")
"""In a checkout, a link to the page in ``docs``; the wheel has a copy."""


def sections() -> dict[str, str]:
    """The page's sections, with their headings, by anchor."""
    _, *parts = re.split(r"^(?=## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {_anchor(part.partition("\n")[0].removeprefix("## ")): part.rstrip() for part in parts}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a section, or all anchors; returns the exit code."""
    known = sections()
    parser = argparse.ArgumentParser(
        "python -m fsdp_dynamo.troubleshooting",
        description="Print a section of the troubleshooting page, or the names of all sections.",
    )
    parser.add_argument("section", nargs="?", help="name of a section, as errors give it")
    section = parser.parse_args(arguments).section
    if section in known:
        print(known[section])
        return 0
    if section is not None:
        print(f"expected one of these, got {section!r}:", file=sys.stderr)
    print("\n".join(known))
    return 0 if section is None else 2


if __name__ == "__main__":
    raise SystemExit(main())
