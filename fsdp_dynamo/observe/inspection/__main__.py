"""``python -m fsdp_dynamo.observe.inspection --module pkg:fn``: inspect a script of your own.

Alone, or under torchrun::

    torchrun --nproc-per-node 2 -m fsdp_dynamo.observe.inspection --module train:main -- --steps 2

main() is called without arguments; what follows -- is in sys.argv[1:]. The decompiled code needs
depyf: pip install 'fsdp-dynamo[inspection]'.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.observe.inspection import NothingCompiledError, inspect_graphs, nothing_compiled


def main(argv: Sequence[str] | None = None) -> int:
    """Run the function inside ``inspect_graphs``; its ``sys.argv`` is what follows ``--``."""
    parsed = _parser().parse_args(argv)
    sys.argv = [parsed.module, *parsed.rest]
    function = load(parsed.module)
    own = int(os.environ.get("RANK", "0"))
    try:
        rank = None if parsed.rank == "all" else int(parsed.rank)
        with inspect_graphs(parsed.out, rank) as found:
            function()
    except NothingCompiledError:
        name = getattr(function, "__name__", parsed.module)
        raise nothing_compiled(
            f"{name}() was called without arguments; what follows -- is in sys.argv[1:]. "
            "It must run a step of what torch.compile returned."
        ) from None
    if found.folder is not None:
        print(f"rank {own}: {len(found.listings)} listings, {found.folder / 'index.html'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fsdp_dynamo.inspection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--module",
        required=True,
        metavar="PKG:FN",
        help="function to call, without arguments",
    )
    parser.add_argument("--out", default="out", help="folder for the files (default: out)")
    parser.add_argument("--rank", default="0", help='rank that writes, or "all" (default: 0)')
    parser.add_argument(
        "rest", nargs="*", metavar="-- ARGUMENTS", help="arguments for the script: its sys.argv[1:]"
    )
    return parser


def load(name: str) -> Callable[[], Any]:
    """The function that ``"package.module:function"`` names.

    Raises:
        FSDPValueError: there is none.
    """
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise FSDPValueError(
            expected="--module PKG:FN, a module and a function in it without arguments",
            got=f"'{name}' ({error})",
            where="fsdp_dynamo.inspection",
            fix="The module is looked for in the current folder too.",
        ) from error
    result: Callable[[], Any] = function
    return result


if __name__ == "__main__":
    sys.exit(main())
