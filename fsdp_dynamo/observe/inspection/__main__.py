"""``python -m fsdp_dynamo inspect --module pkg:fn``: inspect your own script.

It runs by itself or under torchrun::

    torchrun --nproc-per-node 2 -m fsdp_dynamo inspect --module train:main -- --steps 2

main() is called without arguments; arguments after -- are in sys.argv[1:]. Decompiled code needs
depyf: pip install -e '.[inspection]' in a clone of fsdp_dynamo.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fsdp_dynamo.observe.command_line import load_function
from fsdp_dynamo.observe.inspection import NothingCompiledError, inspect_graphs, nothing_compiled


def main(argv: Sequence[str] | None = None) -> int:
    """Run the function inside ``inspect_graphs``, with the arguments after ``--`` as its own."""
    parsed = _parser().parse_args(argv)
    sys.argv = [parsed.module, *parsed.rest]
    function = load_function(parsed.module, "a function without arguments", "inspection")
    own = int(os.environ.get("RANK", "0"))
    try:
        with inspect_graphs(parsed.out, parsed.rank) as found:
            function()
    except NothingCompiledError:
        name = getattr(function, "__name__", parsed.module)
        raise nothing_compiled(
            f"{name}() was called without arguments; arguments after -- are in sys.argv[1:]. "
            "It must run a step of what torch.compile returned."
        ) from None
    if found.folder is not None:
        print(f"rank {own}: {len(found.listings)} listings in {found.folder}")
    return 0


def _rank(text: str) -> int | None:
    if not text.isdecimal() and text != "all":
        raise argparse.ArgumentTypeError(f"expected a rank, or 'all', got '{text}'")
    return None if text == "all" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fsdp_dynamo inspect",
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
    parser.add_argument(
        "--rank", default=0, type=_rank, help='rank that writes, or "all" (default: 0)'
    )
    parser.add_argument(
        "rest", nargs="*", metavar="-- ARGUMENTS", help="arguments for the script: its sys.argv[1:]"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
