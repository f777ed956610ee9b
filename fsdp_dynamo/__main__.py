"""Commands of the library: ``python -m fsdp_dynamo COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = {
    "estimate": (
        "predict memory, communication and step time of a model on a cluster",
        "fsdp_dynamo.estimator.__main__",
    ),
    "flight": (
        "explain the flight records of a run that failed",
        "fsdp_dynamo.health.flight_recorder",
    ),
    "troubleshoot": (
        "print a section of the troubleshooting page, or the names of all sections",
        __name__,
    ),
}
"""Summary of each command, and the module whose ``main(arguments)`` runs it."""

PAGE = Path(__file__).with_name("troubleshooting.md")
"""In a checkout, a link to the page in ``docs``; the wheel has a copy."""


def run(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; returns the exit code."""
    name, *rest = arguments or ["--help"]
    if name not in COMMANDS:
        print("usage: python -m fsdp_dynamo COMMAND ...\n\ncommands (each has --help):")
        for command, (summary, _) in COMMANDS.items():
            print(f"  {command:12}  {summary}")
        return 0 if name in ("-h", "--help") else 2
    _, module = COMMANDS[name]
    command_main = main if module == __name__ else importlib.import_module(module).main
    code: int = command_main(rest)
    return code


def sections() -> dict[str, str]:
    """Sections of the troubleshooting page, with their headings, by anchor."""
    _, *parts = re.split(r"^(?=## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {_anchor(part.partition("\n")[0].removeprefix("## ")): part.rstrip() for part in parts}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def main(arguments: Sequence[str]) -> int:
    """Print a section of the troubleshooting page, or all anchors; returns the exit code."""
    known = sections()
    parser = argparse.ArgumentParser(
        "python -m fsdp_dynamo troubleshoot", description=COMMANDS["troubleshoot"][0]
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
    raise SystemExit(run(sys.argv[1:]))
