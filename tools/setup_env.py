"""Make the virtual environment: torch, the package with its extras, nothing twice.

If the Python that runs this has a torch that sees an accelerator, the environment uses that one;
otherwise it gets ``torch==2.13.0``. ``PIP_TORCH_ARGS`` adds arguments to that one install (an
index of CPU builds, for example).

    python tools/setup_env.py .venv
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
EXTRAS = "test,demo,inspection,benchmarks"


def has_accelerated_torch() -> bool:
    """Whether this Python's own torch sees an accelerator."""
    check = "import torch, sys; sys.exit(0 if torch.accelerator.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


def pip(python: Path, *arguments: str) -> None:
    """Run pip quietly in the new environment."""
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def main() -> None:
    """Create or complete the environment named on the command line."""
    folder = Path(sys.argv[1])
    project = Path(__file__).resolve().parent.parent
    shared = has_accelerated_torch()
    python = folder / "bin" / "python"
    if not python.exists():
        venv.EnvBuilder(with_pip=True, system_site_packages=shared).create(folder)
    if not shared:
        pip(python, *shlex.split(os.environ.get("PIP_TORCH_ARGS", "")), TORCH)
    pip(python, "-e", f"{project}[{EXTRAS}]")


if __name__ == "__main__":
    main()
