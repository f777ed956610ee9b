"""The examples run as they say, alone and on two hosts; what they print is what must come out."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import link
from benchmarks.command_line import BadInputError
from examples import expert_parallel, hsdp, lora, pipeline

EXAMPLES = Path(__file__).parents[2] / "examples"
SLURM = EXAMPLES / "slurm.sh"


def _run(command: list[str], folder: Path, **variables: str) -> str:
    """Run from elsewhere; what was printed."""
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **quiet, "PYTHONPATH": path, **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _torchrun(num_ranks: int, *command: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={num_ranks}", *command]


def _losses(printed: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.slow
def test_lora(tmp_path: Path) -> None:
    """The frozen part is held in shards, without gradients or states; the adapter is all saved."""
    file = tmp_path / "adapter.pt"
    printed = _run(_torchrun(2, str(EXAMPLES / "lora.py"), str(file)), tmp_path)
    model = lora.make_model()
    named = dict(model.named_parameters())
    learning = {name: param for name, param in named.items() if param.requires_grad}
    num_learning = sum(param.numel() for param in learning.values())
    num_frozen = sum(param.numel() for param in named.values()) - num_learning
    found = re.search(r"holds (\d+) frozen elements and (\d+) that learn", printed)
    assert found is not None
    held = [int(number) for number in found.groups()]
    assert held == [pytest.approx(n / 2, rel=0.01) for n in (num_frozen, num_learning)]  # rows
    assert f"{num_learning + len(learning)} of states, 0 frozen gradients" in printed
    adapter = torch.load(file, weights_only=True)
    assert adapter.keys() == learning.keys()
    assert all("lora_" in name for name in adapter)
    with torch.no_grad():
        before = lora.loss_of(model, seed=0).item()
        model.load_state_dict(adapter, strict=False)
        after = lora.loss_of(model, seed=0).item()
    assert after == pytest.approx(_losses(printed)[-1], rel=1e-6)
    assert after < 0.8 * before


def _losses_of_one_process(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    loss_of: Callable[[int], torch.Tensor],
    max_norm: float = math.inf,
) -> tuple[list[float], list[float]]:
    """Losses and norms of a model that has all ranks' data, at the steps that an example prints."""
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if step % 5 in (0, 4):
            losses.append(loss.item())
            norms.append(norm.item())
    return losses, norms


def _require_hsdp(printed: str) -> None:
    model: nn.Module = hsdp.make_model()
    num_elements = sum(param.numel() for param in model.parameters())
    expected, _ = _losses_of_one_process(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        hsdp.STEPS,
        lambda step: torch.stack([hsdp.loss_of(model, step, rank) for rank in range(4)]).mean(),
    )
    assert _losses(printed) == pytest.approx(expected, abs=2e-6)
    assert "mesh 2 x 2" in printed
    found = re.search(r"a rank holds (\d+) elements\n", printed)
    assert found is not None
    held = int(found[1])  # whole rows, and no padding in this rank's shards
    assert num_elements / 2 <= held <= 1.04 * num_elements / 2
    assert f"reduce_scatter: {held * 2 * 4} bytes per step" in printed
    assert f"all_reduce: {held * 4} bytes per step" in printed  # one shard


@pytest.mark.slow
def test_hsdp(tmp_path: Path) -> None:
    _require_hsdp(_run(_torchrun(4, str(EXAMPLES / "hsdp.py"), "2"), tmp_path))


@pytest.mark.slow
def test_expert_parallel(tmp_path: Path) -> None:
    """Losses and norms of one process that has all experts and all ranks' tokens."""
    printed = _run(_torchrun(4, str(EXAMPLES / "expert_parallel.py")), tmp_path)
    model = expert_parallel.make_model()
    losses, expected = _losses_of_one_process(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        expert_parallel.STEPS,
        lambda step: torch.stack(
            [expert_parallel.loss_of(model, step, rank) for rank in range(4)]
        ).mean(),
        max_norm=1.0,
    )
    norms = [float(text) for text in re.findall(r"norm ([\d.]+)", printed)]
    assert _losses(printed) == pytest.approx(losses, rel=1e-4)
    assert norms == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_pipeline(tmp_path: Path) -> None:
    """Losses of one process that has all layers and both shards' data; one reduction a stage."""
    printed = _run(_torchrun(4, str(EXAMPLES / "pipeline.py")), tmp_path)
    model = nn.Sequential(*pipeline.make_layers())

    def loss_of(step: int) -> torch.Tensor:
        batches = [pipeline.batch_of(step, shard) for shard in range(2)]
        return torch.stack([nn.functional.mse_loss(model(x), y) for x, y in batches]).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected, _ = _losses_of_one_process(model, optimizer, pipeline.STEPS, loss_of)
    assert _losses(printed) == pytest.approx(expected, rel=1e-4)
    assert re.findall(r"reductions (\d+)", printed) == ["2"] * len(expected)


# -- Slurm -----------------------------------------------------------------------------------------


def _slurm_commands(folder: Path, hosts: tuple[link.Host, link.Host]) -> None:
    """``srun`` and ``scontrol`` of a cluster whose nodes are two network namespaces."""
    starts = [
        f"ip netns exec {host.namespace} env SLURM_NODEID={number} "
        f'SLURMD_NODENAME={host.address} GLOO_SOCKET_IFNAME={host.interface} "$@" & p{number}=$!'
        for number, host in enumerate(hosts)
    ]
    script = "\n".join(["#!/bin/bash", "shift", *starts, "wait $p0 && wait $p1", ""])
    names = "".join(f"echo {host.address}\n" for host in hosts)
    for name, text in (("srun", script), ("scontrol", f"#!/bin/bash\n{names}")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.mark.slow
def test_slurm_script_on_two_hosts(tmp_path: Path) -> None:
    """torchrun on each of two hosts, a c10d rendezvous at the first: a node is a replica."""
    with ExitStack() as stack:
        try:
            link.check_can_link()
            hosts = stack.enter_context(link.two_hosts(link.Shape()))
        except BadInputError as error:
            pytest.skip(str(error))
        _slurm_commands(tmp_path, hosts)
        job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
        folders = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
        path = os.pathsep.join(folders)
        command = ["bash", str(SLURM), str(EXAMPLES / "hsdp.py")]
        printed = _run(command, tmp_path, PATH=path, RANKS_PER_NODE="2", RESTARTS="0", **job)
        sent = [link.sent_bytes(host) for host in hosts]
    _require_hsdp(printed)
    num_bytes = 4 * sum(param.numel() for param in hsdp.make_model().parameters())
    assert min(sent) > hsdp.STEPS * num_bytes / 2  # each step's all-reduce of both shards, halved
