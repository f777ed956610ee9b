"""Create the virtual environment: torch, and the package with its extras.

If the Python that runs this has a torch that sees an accelerator, the environment uses that one;
otherwise it gets ``torch==2.13.0``. ``PIP_TORCH_ARGS`` adds arguments to that one install (an
index of CPU builds, for example).

    python tools/setup_env.py .venv [--peers]

``--peers`` adds the packages that benchmarks compare with. They are not needed for anything else;
torchtitan comes without most of its dependencies (trackers and data sets), of which only those
that its SimpleFSDP imports are installed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
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
    arguments = [argument for argument in sys.argv[1:] if argument != "--peers"]
    if len(arguments) != 1:
        sys.exit("usage: setup_env.py FOLDER [--peers]")
    folder = Path(arguments[0])
    project = Path(__file__).resolve().parent.parent
    shared = has_accelerated_torch()
    python = folder / "bin" / "python"
    if not python.exists():
        venv.EnvBuilder(with_pip=True, system_site_packages=shared).create(folder)
    if not shared:
        pip(python, *shlex.split(os.environ.get("PIP_TORCH_ARGS", "")), TORCH)
    pip(python, "-e", f"{project}[{EXTRAS}]")
    if "--peers" in sys.argv[1:]:
        install_peers(python)


if __name__ == "__main__":
    main()
