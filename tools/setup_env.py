"""Create or complete the virtual environment: torch, and the package with its extras.

    python tools/setup_env.py .venv [--torch 2.15.0] [--extras demo] [--peers]

``--extras`` names what to install instead of everything that development needs; ``docs`` installs
neither torch nor the package, since the pages are built from sources. ``--peers`` adds the packages
that benchmarks compare with.

Which torch is installed:

- The Python that runs this has a torch that sees an accelerator: the environment uses that torch,
  unless ``--torch`` names a version.
- Linux without an NVIDIA GPU: the CPU build from PyTorch's CPU wheel index, if that can be reached.
  Otherwise, what the default index has, which may be a build with 5 GB of CUDA libraries.
- ``PIP_TORCH_ARGS`` replaces this choice by arguments of your own for that one ``pip install``,
  such as ``--index-url URL``; the empty string means the default index.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

TORCH = "2.13.0"
"""Version that is installed unless ``--torch`` names another; types are checked against it."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROJECT = Path(__file__).resolve().parent.parent
EXTRAS = "test,demo,docs,inspection,benchmarks"
DEEPSPEED = "deepspeed==0.19.8"
TORCHTITAN = "torchtitan==0.3.0"
TORCHTITAN_NEEDS = ("tyro", "spmd_types==0.2.3", "torch_checkpointing", "einops")
"""What torchtitan's SimpleFSDP imports; its other dependencies are trackers and data sets."""

_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA's driver, on Linux and in Windows' Linux. Only its builds of torch are in
the default index."""


def has_accelerated_torch() -> bool:
    """Return whether this Python's own torch sees an accelerator."""
    check = "import torch, sys; sys.exit(0 if torch.accelerator.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


def has_nvidia_gpu() -> bool:
    """Return whether NVIDIA's driver is loaded."""
    return any(Path(device).exists() for device in _NVIDIA_DEVICES)


def can_reach(index: str) -> bool:
    """Return whether a package index has a page for torch."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=5) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def torch_arguments() -> list[str]:
    """Return pip's arguments that choose the build of torch."""
    given = os.environ.get("PIP_TORCH_ARGS")
    if given is not None:
        return shlex.split(given)
    if (
        sys.platform != "linux" or has_nvidia_gpu()
    ):  # the default index has CPU builds for other systems
        return []
    if can_reach(CPU_INDEX):
        # Not --index-url: a mirror that pip is configured for still serves torch's dependencies.
        # A CPU build counts as newer than the same version without a suffix, so pip prefers it.
        return ["--extra-index-url", CPU_INDEX]
    say(f"{CPU_INDEX} cannot be reached: torch comes from the default index")
    return []


def requirements_of(extra: str) -> list[str]:
    """Return the packages of an extra; Python 3.10 has no ``tomllib``."""
    found = re.search(rf"^{extra} = (\[.*\])$", (PROJECT / "pyproject.toml").read_text(), re.M)
    if found is None:
        raise SystemExit(f"--extras: expected a one-line extra of pyproject.toml, got {extra!r}")
    return list(ast.literal_eval(found[1]))


def say(text: str) -> None:
    """Print a line of progress at once, between what pip prints."""
    print(f"set-up: {text}", flush=True)


def pip(python: Path, what: str, *arguments: str) -> None:
    """Run pip in the new environment; only a terminal shows its progress bars."""
    say(f"{what} ...")
    begin = time.monotonic()
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    quiet = [] if sys.stdout.isatty() else ["-q"]
    subprocess.run([*command, *quiet, *arguments], check=True)
    say(f"{what}: {time.monotonic() - begin:.0f} s")


def install_peers(python: Path) -> None:
    """Install the packages that benchmarks compare with; report those that fail."""
    pip(python, "build tools", "setuptools>=77", "wheel")
    recipes = {
        # Its build imports torch: with isolation pip would fetch another one for that.
        DEEPSPEED: (("--no-build-isolation", DEEPSPEED),),
        TORCHTITAN: (TORCHTITAN_NEEDS, ("--no-deps", TORCHTITAN)),
    }
    for name, steps in recipes.items():
        try:
            for arguments in steps:
                pip(python, name, *arguments)
        except subprocess.CalledProcessError:
            print(f"{name} could not be installed; comparisons go on without it", file=sys.stderr)


def main() -> None:
    """Create or complete the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", metavar="VERSION", help=f"instead of {TORCH}")
    parser.add_argument("--extras", default=EXTRAS, help=f"instead of {EXTRAS}")
    parser.add_argument(
        "--peers", action="store_true", help="packages that benchmarks compare with"
    )
    asked = parser.parse_args()
    shared = asked.torch is None and has_accelerated_torch()
    python = asked.folder / "bin" / "python"
    if not python.exists():
        say(f"environment {asked.folder}")
        venv.EnvBuilder(with_pip=True, system_site_packages=shared).create(asked.folder)
    if asked.extras == "docs":
        pip(python, "packages that build the pages", *requirements_of("docs"))
        return
    if not shared:
        version = asked.torch or TORCH
        pip(python, f"torch {version}", *torch_arguments(), f"torch=={version}")
    pip(python, f"fsdp_dynamo [{asked.extras}]", "-e", f"{PROJECT}[{asked.extras}]")
    if asked.peers:
        install_peers(python)


if __name__ == "__main__":
    main()
