"""A set of benchmarks, run one after the other: records, tables and pictures in one folder.

    python benchmarks/bench.py [--full] [--out runs/bench]

The short set (``make bench``) takes under 10 minutes on 2 cores; ``--full`` has
most of what ``docs/performance.md`` reports on CPUs and takes about 40. With root, ``ip`` and
``tc`` the comparisons run over a link of 1 Gbit/s between two network namespaces, else over the
loopback.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import BadInputError
from benchmarks.link import check_can_link
from benchmarks.pictures import draw_all

HERE = Path(__file__).resolve().parent

EAGER = "plain,ddp,fsdp1,fsdp2,deepspeed,ours"
COMPILED = (
    "ddp,plain_inductor,fsdp2_inductor,simple_fsdp_aot_eager,simple_fsdp_inductor,"
    "ours_hooks_inductor,ours_graph_aot_eager,ours_graph_inductor,ours_graph_inductor_kept"
)
SHORT_COMPILED = (
    "ddp,plain,fsdp2_aot_eager,simple_fsdp_aot_eager,ours_hooks_aot_eager,ours_graph_aot_eager"
)

# aot_eager: with an empty cache Inductor needs half a minute before it compiles anything.
SHORT_DEPTHS = "fsdp2_aot_eager,simple_fsdp_aot_eager,ours_hooks_aot_eager,ours_graph_aot_eager"


class Part(NamedTuple):
    """One script of the set; its record is ``NAME.json``."""

    name: str
    script: str
    arguments: tuple[str, ...]


def link_arguments() -> tuple[str, ...]:
    """``--link`` if a link can be created; otherwise nothing, and a printed reason."""
    try:
        check_can_link()
    except BadInputError as error:
        print(f"no link, comparing over the loopback: {error}")
        return ()
    return ("--link", "1gbit")


def short_set() -> list[Part]:
    """The set of ``make bench``."""
    link = link_arguments()
    return [
        Part("eager", "compare.py", (*link, "--peers", EAGER, "--rounds", "3")),
        Part("compiled", "compare.py", (*link, "--peers", SHORT_COMPILED, "--rounds", "3")),
        Part("host_overhead", "host_overhead.py", ("--units", "50", "--rounds", "3")),
        Part("compile_time", "compile_time.py", ("--depths", "2,4,8", "--peers", SHORT_DEPTHS)),
        Part(
            "scaling",
            "scaling.py",
            ("--decoder", "small", "--sizes", "2,4,16", "--peers", "plain,fsdp2,ours"),
        ),
    ]


def full_set(out: Path) -> list[Part]:
    """The set that the documentation reports."""
    link = link_arguments()
    parts = [
        Part("eager", "compare.py", (*link, "--peers", EAGER, "--rounds", "7")),
        Part("compiled", "compare.py", (*link, "--peers", COMPILED, "--rounds", "7")),
        Part("host_overhead", "host_overhead.py", ()),
        Part("compile_time", "compile_time.py", ()),
        Part("saving", "saving.py", ("--rounds", "7")),
        Part("scaling", "scaling.py", ("--cluster", "slow_ethernet", "--rounds", "5")),
        # Without SimpleFSDP: DTensor traces for minutes where rows do not divide by 4096 ranks.
        Part(
            "scaling_weak",
            "scaling.py",
            (
                "--weak",
                "--sizes",
                "8,64,512,4096",
                "--peers",
                "plain,fsdp2,ours,ours_graph_aot_eager",
            ),
        ),
    ]
    if link:
        record = ("--validate", str(out / "eager.json"))
        parts.append(Part("validation", "scaling.py", record))
    return parts


def run_part(part: Part, out: Path) -> bool:
    """Run one script; returns whether it succeeded."""
    began = time.monotonic()
    print(f"\n=== {part.name}: {part.script} {' '.join(part.arguments)}", flush=True)
    record = ("--json", str(out / f"{part.name}.json"))
    command = [sys.executable, str(HERE / part.script), *part.arguments, *record]
    code = subprocess.run(command).returncode
    print(f"=== {part.name}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
    return code == 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="the set that the docs report")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--only", help="names of parts, joined by commas")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = full_set(options.out) if options.full else short_set()
    if options.only is not None:
        wanted = options.only.split(",")
        unknown = set(wanted) - {part.name for part in parts}
        if unknown:
            parser.error(f"--only: expected some of {[p.name for p in parts]}, got {unknown}")
        parts = [part for part in parts if part.name in wanted]
    succeeded = [run_part(part, options.out) for part in parts]
    for picture in draw_all(options.out):
        print(picture)
    raise SystemExit(0 if all(succeeded) else 1)


if __name__ == "__main__":
    main()
