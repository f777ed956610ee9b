"""The package as it is installed: a wheel, in an environment that the checkout is not in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdp_dynamo

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("fsdp_dynamo", "graph_passes")
BACKENDS = ("fsdp_dynamo", "fsdp_dynamo_aot_eager")
SMOKE = """
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import torch
import torch.distributed as dist

backends = {e.name: e for e in entry_points(group="torch_dynamo_backends")}
assert "fsdp_dynamo" not in sys.modules
for name in BACKENDS:
    assert callable(backends[name].load()), name

import fsdp_dynamo
import graph_passes

for package in (fsdp_dynamo, graph_passes):
    folder = Path(package.__file__).parent
    assert folder.is_relative_to(sys.prefix), folder
    assert (folder / "py.typed").is_file()
assert fsdp_dynamo.__version__ == version("fsdp-dynamo") == VERSION

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
model = fsdp_dynamo.FSDP(model)
step = torch.compile(model, fullgraph=True, backend="fsdp_dynamo_aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 8)
losses = []
with fsdp_dynamo.inspect_graphs(sys.argv[1]):
    for _ in range(3):
        loss = (step(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
assert losses[2] < losses[1] < losses[0], losses
if dist.get_rank() == 0:
    assert [*Path(sys.argv[1]).glob("_whole.backward.after_planner.py")]
assert "transformers" not in sys.modules and "accelerate" not in sys.modules
dist.destroy_process_group()
print("rank is done")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel, built in a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, source / package, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/troubleshooting.md"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    _run([sys.executable, "-m", "pip", "wheel", str(source), *options], folder)
    (built,) = folder.glob("*.whl")
    yield built
    shutil.rmtree(folder)


def _run(command: list[str], folder: Path) -> str:
    """Run outside of the checkout, which must not be found by its environment either."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_wheel_has_all_of_the_packages(wheel: Path) -> None:
    """Every file of both packages, nothing else, and the version of the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        page = archive.read("fsdp_dynamo/troubleshooting.md")  # a link in the checkout
        (license_file,) = [n for n in archive.namelist() if n.endswith("/licenses/LICENSE")]
        assert archive.read(license_file) == (REPOSITORY / "LICENSE").read_bytes()
    assert page == (REPOSITORY / "docs" / "troubleshooting.md").read_bytes()
    expected = [
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sorted(names) == sorted(expected)
    assert wheel.name == f"fsdp_dynamo-{fsdp_dynamo.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows what the package depends on."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (own / "borrowed.pth").write_text(str(Path(torch.__file__).parent.parent))
    install = ["install", "--no-deps", "--no-index", "-q", str(wheel)]
    _run([sys.executable, "-m", "pip", "--python", str(python), *install], tmp_path)
    (tmp_path / "run").mkdir()
    script = tmp_path / "run" / "smoke.py"
    values = f"BACKENDS = {BACKENDS!r}\nVERSION = {fsdp_dynamo.__version__!r}\n"
    script.write_text(values + SMOKE)
    launcher = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = _run([*launcher, str(script), str(tmp_path / "page")], tmp_path / "run")
    assert printed.count("rank is done") == 2
