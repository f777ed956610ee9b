"""Reports: machine and versions, a record as JSON, tables in the terminal."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "deepspeed", "torchtitan")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Facts about the machine."""
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        facts["gpus"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
    return facts


def command() -> str:
    """The command line; its paths are relative to the project, or names."""
    given = [
        one if i and not Path(one).is_absolute() else _path(one) for i, one in enumerate(sys.argv)
    ]
    return shlex.join(["python", *given])


def _path(text: str) -> str:
    path = Path(text).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def record(kind: str, **results: Any) -> dict[str, Any]:
    """Record of a run: command, date, machine, versions and results."""
    return {
        "kind": kind,
        "command": command(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: found for name in PACKAGES if (found := version(name))},
        **results,
    }


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first is left-aligned, the others right.

    The first cell says which torch the table is of.
    """
    header = (f"{header[0]} (torch {torch.__version__})", *header[1:])
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = (c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])
