"""What test_lightning runs on each rank of the pool: tiny Trainers, and what came of them."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins import MixedPrecision as Autocast
from models import VOCABULARY, make_transformer
from modes import MODES
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fsdp_dynamo import FSDPError, MixedPrecision, checkpoint, record_events
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.integrations.lightning import FSDPDynamoStrategy
from fsdp_dynamo.integrations.sharding import Sharding


class Module(pl.LightningModule):  # type: ignore[misc]
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
        self.batches = rows(10 + rank).split(2)
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


def rows(seed: int, num_rows: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (num_rows, 8), generator=generator)


def loader(seed: int, num_rows: int = 16) -> Any:
    return torch.utils.data.DataLoader(rows(seed, num_rows), batch_size=2)


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


def _whole(module: Any) -> dict[str, torch.Tensor]:
    values = module.state_dict().items()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in values}


def trained(rank: int, kind: str, compiled: Any, changed: dict[str, Any]) -> dict[str, Any]:
    """The same run with Lightning's DDP, with it but for the clipping, and sharded."""
    found: dict[str, Any] = {}
    free = {**changed, "gradient_clip_val": None}
    runs = {
        "ddp": ("ddp", changed),
        "free": ("ddp", free),
        "ours": (_sharded(compile=compiled), changed),
    }
    for name, (strategy, arguments) in runs.items():
        counters.clear()
        module = Module() if name != "ours" else globals()[kind]()
        with record_events() as log:
            trainer = _fit(rank, strategy, module, **arguments)
        found[name] = {
            "losses": module.losses,
            "norms": module.norms,
            "eval": _validated(rank, trainer, module),
            "whole": _whole(module),
            "numel": sum(local_of(p).numel() for p in module.parameters()),
            "scatters": len(log.keys("reduce_scatter")),
            "graphs": counters["stats"]["unique_graphs"],
        }
    return found


def in_low_precision(rank: int) -> list[list[float]]:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules = [Direct(), Direct(), Direct()]
    _fit(rank, "ddp", modules[0])
    _fit(rank, _sharded(mixed_precision=low), modules[1])
    _fit(rank, _sharded(mixed_precision=low), modules[2], precision="bf16-mixed")
    return [module.losses for module in modules]


def resumed(rank: int, folder: str) -> dict[str, Any]:
    """Four epochs, and two of them and then, in another Trainer, the other two."""

    def saving(name: str) -> list[Any]:
        return [ModelCheckpoint(Path(folder) / name, save_last=True, filename="{epoch}")]

    modules = [Adaptive(0.2) for _ in range(3)]
    whole = _fit(rank, _sharded(), modules[0], callbacks=saving("whole"), max_epochs=4)
    _fit(rank, _sharded(), modules[1], callbacks=saving("parts"), max_epochs=2)
    modules[1].losses.clear()
    named = {"callbacks": saving("parts"), "max_epochs": 4, "ckpt_path": "last"}
    again = _fit(rank, _sharded(), modules[2], **named)
    first = Path(folder) / "parts" / "epoch=3.ckpt"
    light = Path(folder) / "weights"
    again.save_checkpoint(light, weights_only=True)
    fresh = Adaptive()
    return {
        "losses": [modules[0].losses[8:], modules[2].losses],
        "equal": [
            [local_of(p).tolist() for p in whole.strategy.lightning_module.parameters()]
            == [local_of(p).tolist() for p in modules[2].parameters()],
            _moments(whole) == _moments(again),
        ],
        "rates": [t.lr_scheduler_configs[0].scheduler.get_last_lr() for t in (whole, again)],
        "eval": [
            _validated(rank, whole, modules[0]),
            _validated(rank, _trainer(rank, _sharded()), fresh, ckpt_path=str(first)),
            _validated(rank, again, modules[2], ckpt_path=str(light)),
        ],
        "files": sorted(path.name for path in (Path(folder) / "parts").iterdir()),
        "whole": _whole(modules[2]),
    }


def _moments(trainer: Any) -> dict[tuple[int, str], Any]:
    states = trainer.optimizers[0].state_dict()["state"].items()
    return {(i, k): local_of(v).tolist() for i, state in states for k, v in state.items()}


def within_epoch(rank: int, folder: str) -> list[list[float]]:
    each = ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    whole, again = Adaptive(), Adaptive()
    _fit(rank, _sharded(), whole, callbacks=[each], loader=Resumable(rank))
    path = Path(folder) / "step=6.ckpt"
    _fit(rank, _sharded(), again, ckpt_path=path, loader=Resumable(rank))
    return [whole.losses[6:], again.losses]


def refused(rank: int, kind: str, changed: dict[str, Any]) -> str:
    """What is said; the module is as it was, unless it was to be loaded."""
    named = dict(changed)
    if named.pop("precision", None):
        named["plugins"] = [Autocast("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    elif "plugins" in named:
        named["plugins"] = [AsyncCheckpointIO()]
    compiled = MODES["graph"] if named.pop("compile", False) else None
    module = globals()[kind]()
    numel = sum(p.numel() for p in module.parameters())
    given = torch.compile(module, backend="eager") if named.pop("is_compiled", False) else module
    try:
        _fit(rank, _sharded(compile=compiled), given, **named)
    except FSDPError as error:
        assert "ckpt_path" in named or sum(p.numel() for p in module.parameters()) == numel
        return str(error)
    return "nothing"


def read_by_plain(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """A checkpoint of two ranks in a module of one."""
    module = Module()
    checkpoint.load(folder, module)
    return _whole(module)
