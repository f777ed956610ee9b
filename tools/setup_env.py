"""Create the virtual environment: torch, and the package with its extras.

If the Python that runs this has a torch that sees an accelerator, the environment uses that one;
otherwise it gets 2.13.0. ``--torch`` names another version. ``PIP_TORCH_ARGS`` adds arguments to
that one install (an index of CPU builds, for example).

    python tools/setup_env.py .venv [--torch 2.15.0] [--peers]

``--peers`` adds the packages that benchmarks compare with. They are not needed for anything else;
torchtitan comes without most of its dependencies (trackers and data sets), of which only those
that its SimpleFSDP imports are installed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "2.13.0"
"""The newest whose CPU build pip finds without an index of its own: others bring 5 GB of CUDA."""

EXTRAS = "test,demo,docs,inspection,benchmarks"
DEEPSPEED = "deepspeed==0.19.8"
TORCHTITAN = "torchtitan==0.3.0"
TORCHTITAN_NEEDS = ("tyro", "spmd_types==0.2.3", "torch_checkpointing", "einops")


def has_accelerated_torch() -> bool:
    """Whether this Python's own torch sees an accelerator."""
    check = "import torch, sys; sys.exit(0 if torch.accelerator.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


def pip(python: Path, *arguments: str) -> None:
    """Run pip quietly in the new environment."""
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def install_peers(python: Path) -> None:
    """Install the packages that benchmarks compare with; report those that fail."""
    pip(python, "setuptools>=77", "wheel")
    recipes = {
        # Its build imports torch: with isolation pip would fetch another one for that.
        DEEPSPEED: (("--no-build-isolation", DEEPSPEED),),
        TORCHTITAN: (TORCHTITAN_NEEDS, ("--no-deps", TORCHTITAN)),
    }
    for name, steps in recipes.items():
        try:
            for arguments in steps:
                pip(python, *arguments)
        except subprocess.CalledProcessError:
            print(f"{name} could not be installed; comparisons go on without it", file=sys.stderr)


def main() -> None:
    """Create or complete the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", metavar="VERSION", help=f"instead of {TORCH}")
    parser.add_argument(
        "--peers", action="store_true", help="packages that benchmarks compare with"
    )
    asked = parser.parse_args()
    project = Path(__file__).resolve().parent.parent
    shared = asked.torch is None and has_accelerated_torch()
    python = asked.folder / "bin" / "python"
    if not python.exists():
        venv.EnvBuilder(with_pip=True, system_site_packages=shared).create(asked.folder)
    if not shared:
        index = shlex.split(os.environ.get("PIP_TORCH_ARGS", ""))
        pip(python, *index, f"torch=={asked.torch or TORCH}")
    pip(python, "-e", f"{project}[{EXTRAS}]")
    if asked.peers:
        install_peers(python)


if __name__ == "__main__":
    main()
