"""lightning.pytorch.Trainer on fsdp_dynamo: FSDPDynamoStrategy against Lightning's own DDP."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import VOCABULARY, make_transformer
from modes import MODES
from pool import on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fsdp_dynamo import FSDPError, MixedPrecision, checkpoint, record_events
from fsdp_dynamo.core.dtensors import local_of

pl = pytest.importorskip("lightning.pytorch")

from lightning.fabric.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import AsyncCheckpointIO  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision as Autocast  # noqa: E402
from loops import whole  # noqa: E402

from fsdp_dynamo.integrations.lightning import FSDPDynamoStrategy  # noqa: E402
from fsdp_dynamo.integrations.sharding import Sharding  # noqa: E402

TIMEOUT_S = 120


class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
    """A parameter of its own, so the root unit is the module; steps call ``self(...)``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = make_transformer(num_blocks=2)
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.net(tokens)) + self.bias

    def outputs(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.outputs(tokens)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """Records the norm of the gradients before they are clipped."""
        grads = [local_of(p.grad) for p in self.parameters() if p.grad is not None]
        squares = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        if isinstance(self.trainer.strategy, FSDPDynamoStrategy):  # of this rank's shards
            dist.all_reduce(squares)
        self.norms.append(squares.sqrt().item())
        super().configure_gradient_clipping(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


class Direct(Module):
    """Steps call submodules and use parameters, not ``self(...)``."""

    outputs = Module.forward


class Adaptive(Module):
    """With two moments in the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


class WithoutForward(Direct):
    forward = pl.LightningModule.forward


class Manual(Module):
    automatic_optimization = False


class Resumable:
    """A loader that can begin in the middle of an epoch."""

    def __init__(self, rank: int) -> None:
        self.batches = _rows(10 + rank).split(2)
        self.begin = self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self.begin = self.begin, 0
        for position in range(begin, len(self)):
            self.position = position + 1
            yield self.batches[position]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["position"]


def _rows(seed: int, num_rows: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (num_rows, 8), generator=generator)


def loader(seed: int, num_rows: int = 16) -> Any:
    return torch.utils.data.DataLoader(_rows(seed, num_rows), batch_size=2)


def _trainer(rank: int, strategy: Any, **changed: Any) -> Any:
    """A Trainer in a rank of the pool, whose process group it takes."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": "callbacks" in changed,
    }
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    plugins = [LightningEnvironment(), *changed.pop("plugins", [])]
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank)}):
        return pl.Trainer(
            **{"accelerator": "cpu", "devices": 2, "max_epochs": 2, **quiet, **changed},
            plugins=plugins,
            strategy=strategy,
        )


def _fit(rank: int, strategy: Any, module: Any, **changed: Any) -> Any:
    """Train a module; returns its Trainer."""
    ckpt_path, data = changed.pop("ckpt_path", None), changed.pop("loader", loader(1))
    trainer = _trainer(rank, strategy, **changed)
    torch.manual_seed(7)
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank)}):
        trainer.fit(module, data, loader(2, 8), ckpt_path=ckpt_path)
    return trainer


def _validated(rank: int, trainer: Any, module: Any, **named: Any) -> float:
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank)}):
        return trainer.validate(module, loader(2, 8), verbose=False, **named)[0]["loss"]


def _sharded(**named: Any) -> FSDPDynamoStrategy:
    return FSDPDynamoStrategy(Sharding(layers=["Block"], **named))


def _numel(module: nn.Module) -> int:
    """Of what this rank holds."""
    return sum(local_of(param).numel() for param in module.parameters())


def _same_as_ddp(
    rank: int, ours: Module, mode: str, tolerance: float, **changed: Any
) -> tuple[Module, Any]:
    """Train with Lightning's DDP and sharded; returns the module of DDP, and the events of ours."""
    plain = Module()
    trainer = _fit(rank, "ddp", plain, **changed)
    expected = _validated(rank, trainer, plain)
    counters.clear()
    with record_events() as log:
        trainer = _fit(rank, _sharded(compile=MODES[mode]), ours, **changed)
    assert _validated(rank, trainer, ours) == pytest.approx(expected, rel=tolerance)
    graphs = counters["stats"]["unique_graphs"]
    assert (graphs >= 2) == (mode != "eager")  # trained, and evaluated
    assert len(plain.losses) == 16 // 2 * changed.get("max_epochs", 2) // 2
    assert plain.losses[-1] < plain.losses[0]
    assert ours.losses == pytest.approx(plain.losses, rel=tolerance)
    assert ours.norms == pytest.approx(plain.norms, rel=10 * tolerance)
    assert plain.norms
    got = ours.state_dict()
    for fqn, value in plain.state_dict().items():
        is_low = value.dtype == torch.bfloat16  # one unit in the last place of a parameter near 1
        atol = 8e-3 if is_low else tolerance
        torch.testing.assert_close(whole(got[fqn]), value, rtol=0, atol=atol)
    return plain, log


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("Direct", "eager"),
        pytest.param("Module", "graph", marks=pytest.mark.slow),
        pytest.param("Module", "hooks", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_trains_as_ddp(rank: int, kind: str, mode: str) -> None:
    """Two batches a step are reduced once, gradients are clipped, evaluation in inference mode."""
    changed = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    ours = globals()[kind]()
    plain, log = _same_as_ddp(rank, ours, mode, 2e-6, **changed)
    assert 0.49 < _numel(ours) / _numel(plain) < 0.51
    assert len(log.keys("reduce_scatter")) == 3 * 4  # 3 units, 4 steps
    assert min(plain.norms) > 0.3  # clipped in each step


@pytest.mark.parametrize(
    ("precision", "kind", "mode"),
    [
        ("bf16-mixed", "Direct", "eager"),
        ("bf16-true", "Direct", "eager"),
        pytest.param("64-true", "Direct", "eager", marks=pytest.mark.slow),
        pytest.param("bf16-mixed", "Module", "graph", marks=pytest.mark.slow),
        pytest.param("bf16-true", "Module", "hooks", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_precision_is_lightnings(rank: int, precision: str, kind: str, mode: str) -> None:
    """What the Trainer's precision does under DDP it does here."""
    tolerance = 1e-3 if precision == "bf16-true" else 2e-6
    _same_as_ddp(rank, globals()[kind](), mode, tolerance, precision=precision)


@pytest.mark.slow
@on_ranks(2)
def test_low_precision_of_ours(rank: int) -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, alone, in_autocast = Direct(), Direct(), Direct()
    _fit(rank, "ddp", plain)
    _fit(rank, _sharded(mixed_precision=low), alone)
    _fit(rank, _sharded(mixed_precision=low), in_autocast, precision="bf16-mixed")
    assert alone.losses == pytest.approx(plain.losses, rel=2e-2)
    assert in_autocast.losses == pytest.approx(plain.losses, rel=2e-2)
    assert alone.losses != pytest.approx(plain.losses, rel=1e-6)


# -- checkpoints -----------------------------------------------------------------------------------


def _moments(trainer: Any) -> dict[tuple[int, str], Any]:
    states = trainer.optimizers[0].state_dict()["state"].items()
    return {(i, k): local_of(v).tolist() for i, state in states for k, v in state.items()}


@on_ranks(2)
def test_resumed_as_if_never_stopped(rank: int, tmp_path: Path) -> None:
    """Bit by bit, with dropout; evaluated from a checkpoint; a plain module reads it."""

    def saving(name: str) -> list[Any]:
        return [ModelCheckpoint(tmp_path / name, save_last=True, filename="{epoch}")]

    modules = [Adaptive(0.2) for _ in range(3)]
    straight = _fit(rank, _sharded(), modules[0], callbacks=saving("whole"), max_epochs=4)
    _fit(rank, _sharded(), modules[1], callbacks=saving("parts"), max_epochs=2)
    named = {"callbacks": saving("parts"), "max_epochs": 4, "ckpt_path": "last"}
    again = _fit(rank, _sharded(), modules[2], **named)
    assert len(modules[2].losses) == 8
    assert modules[2].losses == modules[0].losses[8:]
    for one, other in zip(modules[0].parameters(), modules[2].parameters(), strict=True):
        assert torch.equal(local_of(one), local_of(other))
    assert _moments(again) == _moments(straight)
    rates = [t.lr_scheduler_configs[0].scheduler.get_last_lr() for t in (straight, again)]
    assert rates[0] == rates[1]

    first, light = tmp_path / "parts" / "epoch=3.ckpt", tmp_path / "weights"
    again.save_checkpoint(light, weights_only=True)
    assert {path.name for path in first.parent.iterdir()} == {"epoch=3.ckpt", "last.ckpt"}
    loss = _validated(rank, straight, modules[0])
    fresh = _trainer(rank, _sharded())
    assert _validated(rank, fresh, Adaptive(), ckpt_path=str(first)) == loss
    assert _validated(rank, again, modules[2], ckpt_path=str(light)) == loss
    plain = Module()
    checkpoint.load(first.parent / "last.ckpt", plain)
    trained = modules[2].state_dict()
    assert all(torch.equal(value, whole(trained[k])) for k, value in plain.state_dict().items())


@on_ranks(2)
def test_resumed_within_an_epoch(rank: int, tmp_path: Path) -> None:
    """With a loader that can: Lightning begins others anew."""
    each = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    straight, again = Adaptive(), Adaptive()
    _fit(rank, _sharded(), straight, callbacks=[each], loader=Resumable(rank))
    _fit(rank, _sharded(), again, ckpt_path=tmp_path / "step=6.ckpt", loader=Resumable(rank))
    assert len(again.losses) == 10
    assert again.losses == straight.losses[6:]


# -- what is refused -------------------------------------------------------------------------------


@on_ranks(2)
def test_refused(rank: int) -> None:
    """The module is as it was, unless it was to be loaded."""
    scaler = Autocast("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    compiled = torch.compile(Module(), backend="eager")
    for module, sharding, changed, words in (
        (Module(), {}, {"plugins": [scaler]}, "a precision without gradient scaler"),
        (Module(), {}, {"plugins": [AsyncCheckpointIO()]}, "no CheckpointIO plugin"),
        (Module(), {}, {"sync_batchnorm": True}, "sync_batchnorm=True"),
        (compiled, {}, {}, r"one of torch\.compile"),
        (Manual(), {}, {}, "automatic_optimization=False"),
        (WithoutForward(), {"compile": MODES["graph"]}, {}, "a module with forward"),
        (Module(), {}, {"ckpt_path": "nowhere.ckpt"}, "a complete checkpoint"),
    ):
        numel = sum(param.numel() for param in module.parameters())
        with pytest.raises(FSDPError, match=words):
            _fit(rank, _sharded(**sharding), module, **changed)
        assert "ckpt_path" in changed or sum(p.numel() for p in module.parameters()) == numel


# -- starting --------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path

import lightning.pytorch as pl
from test_lightning import Direct, FSDPDynamoStrategy, Sharding, loader

module = Direct()
strategy = FSDPDynamoStrategy(Sharding(layers=["Block"]))
trainer = pl.Trainer(
    accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(module, loader(1))
shape = trainer.predict(module, loader(2, 8))[0].shape
Path(sys.argv[1], f"rank-{trainer.global_rank}").write_text(str(list(shape)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_started_by(tmp_path: Path, launcher: str) -> None:
    """Lightning starts the ranks itself, or torchrun does."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests / "integrations", tests / "support", tests.parent)))
    ours = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *(torchrun if launcher == "torchrun" else []), str(script), str(tmp_path)],
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shapes = {path.name: path.read_text() for path in tmp_path.glob("rank-*")}
    assert shapes == dict.fromkeys(["rank-0", "rank-1"], str([2, 8, VOCABULARY]))
