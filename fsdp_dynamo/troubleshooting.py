"""The troubleshooting page, to which errors refer, in the terminal.

python -m fsdp_dynamo.troubleshooting              # all headings
python -m fsdp_dynamo.troubleshooting wrapped-twice
"""

from __future__ import annotations

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


def main(arguments: Sequence[str]) -> int:
    """Print a section, or all anchors; returns the exit code."""
    known = sections()
    if len(arguments) == 1 and arguments[0] in known:
        print(known[arguments[0]])
        return 0
    if arguments:
        print(f"expected one of these, got {' '.join(arguments)!r}:", file=sys.stderr)
    print("\n".join(known))
    return 2 if arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
