"""``python -m fsdp_dynamo.run``: programs for torch's FSDP run on this package, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import argparse, os, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

def train(model, norm):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.rand(4, 8)).square().mean()
        loss.backward()
        norm(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def main(folder):
    out = open(f"{folder}/{dist.get_rank()}", "w")
    wrapped = FSDP(blocks(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
                   use_orig_params=True, device_id=torch.device("cpu"))
    print("wrapper", type(wrapped).__module__, len(FSDP.fsdp_modules(wrapped)),
          *train(wrapped, lambda model: model.clip_grad_norm_(0.1)), file=out)
    model = blocks()
    for block in model:
        fully_shard(block)
    assert isinstance(fully_shard(model), FSDPModule)
    num_units = sum(isinstance(one, FSDPModule) for one in model.modules())
    print("fully_shard", fully_shard.__module__, num_units,
          *train(model, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)), file=out)
    out.close()

if __name__ == "__main__":
    assert os.path.isabs(__file__)
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    folder = parser.parse_args().folder
    dist.init_process_group("gloo")
    main(folder)
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads release the last tensors: else torch's own run may abort
"""

SPAWNING = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from . import place

def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    print(place.NAME, type(FSDP(torch.nn.Linear(4, 4))).__module__, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), 2)
"""


def _run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FSDP_DYNAMO_FLIGHT": "0"}
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=200,
    )


def _results(folder: Path, program: Path, *command: object) -> list[list[str]]:
    """For each rank and front door: its name, the module it is from, its units and losses."""
    folder.mkdir()
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    ended = _run(*launcher, *command, program.name, "--folder", folder, cwd=program.parent)
    assert ended.returncode == 0, ended.stderr
    lines = [line for rank in "01" for line in (folder / rank).read_text().splitlines()]
    return [line.split() for line in lines]


def test_a_program_runs_as_on_torchs_fsdp(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    expected = _results(tmp_path / "torch", program)
    got = _results(tmp_path / "here", program, "-m", "fsdp_dynamo.run")
    assert len(expected) == len(got) == 4
    for (door, module, units, *losses), (door_there, torchs, *wanted) in zip(
        got, expected, strict=True
    ):
        assert (door, units) == (door_there, wanted.pop(0))
        assert module.startswith("fsdp_dynamo.")
        assert torchs.startswith("torch.")
        assert [*map(float, losses)] == pytest.approx([*map(float, wanted)], rel=1e-6)


def test_a_module_and_the_processes_that_it_spawns(tmp_path: Path) -> None:
    """They import the main module again, by its name."""
    package = tmp_path / "programs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "place.py").write_text("NAME = 'a package'")
    (package / "spawning.py").write_text(SPAWNING)
    ended = _run("fsdp_dynamo.run", "programs.spawning", tmp_path, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [ended.stdout.count(one) for one in ("a package", "fsdp_dynamo.wrap.wrapper")] == [2, 2]
    (line,) = [line for line in ended.stderr.split("\n") if "in place of torch's FSDP" in line]
    assert line.startswith("programs.spawning runs on fsdp_dynamo ")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("./no/where.py", "got './no/where.py'"),
        ("email", "got 'email'"),
    ],
)
def test_no_program(program: str, expected: str) -> None:
    ended = _run("fsdp_dynamo.run", program)
    assert ended.returncode == 1
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_name_that_was_imported_before(tmp_path: Path) -> None:
    """It would stay torch's."""
    (tmp_path / "early.py").write_text("from torch.distributed.fsdp import fully_shard")
    code = "import early, fsdp_dynamo.run; fsdp_dynamo.run.replace_torchs_names()"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert "the module 'early', which has torch's fully_shard" in ended.stderr
