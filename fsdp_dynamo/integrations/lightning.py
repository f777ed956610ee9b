"""``lightning.pytorch.Trainer`` on fsdp_dynamo.

    strategy = FSDPDynamoStrategy(Sharding(layers=["Block"]))
    trainer = Trainer(strategy=strategy, gradient_clip_val=1.0, callbacks=[ModelCheckpoint("run")])
    trainer.fit(module, loader, ckpt_path="last")

Lightning starts the ranks and runs the loops. The strategy shards the module before the optimizers
are created, and overrides what needs whole parameters: gradient clipping and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout

from fsdp_dynamo import checkpoint as checkpoints
from fsdp_dynamo.errors import UnsupportedError
from fsdp_dynamo.integrations.sharding import Sharding, shard

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


class FSDPDynamoStrategy(DDPStrategy):  # type: ignore[misc]
    """Strategy that shards the ``LightningModule`` in place before it first trains or evaluates.

    In eager mode a step runs with the root unit's parameters unsharded, so it may call submodules.
    ``Sharding(compile=...)`` compiles the module's ``forward``: steps must then call ``self(...)``
    for everything that has parameters.

    Args:
        sharding: how to shard, and whether to compile.
        process_group_backend: as for ``DDPStrategy``; an existing process group is reused.
        timeout: for collectives, as for ``DDPStrategy``.

    Raises:
        UnsupportedError: when the Trainer runs, if one of its arguments or a property of the module
            does not work with sharding. Nothing was changed.
    """

    def __init__(
        self,
        sharding: Sharding | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.sharding = sharding or Sharding()

    # -- the model ---------------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        self._require_supported(model)
        super().connect(model)

    def setup(self, trainer: pl.Trainer) -> None:
        # DDPStrategy.setup would wrap the model in DDP, or broadcast rank 0's shards.
        Strategy.setup(self, trainer)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_norm

    def model_to_device(self) -> None:
        """Do nothing: sharding moves the model unit by unit."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        shard(model, self.sharding, self.root_device)
        return model.to(self.root_device)  # moves modules that are in no unit, such as metrics

    def teardown(self) -> None:
        """Clean up, but leave the module on its device: NCCL cannot gather shards on the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # -- steps -------------------------------------------------------------------------------------

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        return self._run(super().training_step, arguments, named)

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        return self._run(super().validation_step, arguments, named)

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        return self._run(super().test_step, arguments, named)

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        return self._run(super().predict_step, arguments, named)

    def _run(
        self, step: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Run a step. In eager mode it runs as the root's forward, with the root unsharded."""
        if self.sharding.compile is not None:
            return step(*arguments, **named)
        return self.lightning_module._fsdp_run_method(step, *arguments, **named)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients inside, without communication."""
        with self.lightning_module.no_sync():
            yield

    def _clip_grad_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        self.lightning_module.clip_grad_norm_(clip_val)

    # -- checkpoints -------------------------------------------------------------------------------

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: ``save_checkpoint`` writes each rank's shards."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return nothing: ``save_checkpoint`` writes each rank's shards."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: ``load_checkpoint`` has restored the model."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of ``fsdp_dynamo.checkpoint`` into the folder ``filepath``.

        Raises:
            CheckpointError: see ``checkpoint.save``.
            UnsupportedError: ``storage_options`` were given, or hyperparameters are not plain data.
        """
        is_default = storage_options is None
        _require(is_default, "no storage_options", storage_options, "Leave them out.")
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        path, step = self.broadcast(filepath), checkpoint["global_step"]
        shared = {"lightning": _LightningState(checkpoint)}
        module = self.lightning_module
        checkpoints.save(path, module, optimizers, step=step, shared=shared, keep_last=1)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Restore the model and, in ``fit``, the optimizers; return Lightning's own state.

        Raises:
            CheckpointError: see ``checkpoint.load``; also if another strategy wrote the checkpoint.
        """
        path, module = self.broadcast(checkpoint_path), self.lightning_module
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if is_fitting else []
        own = _LightningState({})
        checkpoints.load(path, module, optimizers, shared={"lightning": own})
        return own.state

    # -- unsupported arguments ---------------------------------------------------------------------

    def _require_supported(self, model: pl.LightningModule) -> None:
        plugin, io = self.precision_plugin, self.checkpoint_io
        has_forward = type(model).forward is not pl.LightningModule.forward
        _require(
            type(plugin) in _PRECISIONS and getattr(plugin, "scaler", None) is None,
            "a precision without gradient scaler",
            type(plugin).__name__,
            "Use precision='bf16-mixed', or Sharding(mixed_precision=...).",
        )
        _require(
            type(io) is TorchCheckpointIO,
            "no CheckpointIO plugin",
            type(io).__name__,
            "Leave it out.",
        )
        _require(
            self._layer_sync is None,
            "modules as they are",
            "sync_batchnorm=True",
            "Call nn.SyncBatchNorm.convert_sync_batchnorm(module) before.",
        )
        _require(
            model._compiler_ctx is None,
            "a module that is not compiled",
            "one of torch.compile",
            "Use Sharding(compile={'backend': ...}).",
        )
        _require(
            model.automatic_optimization,
            "automatic optimization",
            "automatic_optimization=False",
            "Return the loss from training_step.",
        )
        _require(
            has_forward or self.sharding.compile is None,
            "a module with forward, which is compiled",
            "one without",
            "Call self(...) in training_step.",
        )


def _require(is_met: bool, expected: str, got: object, fix: str) -> None:
    if not is_met:
        raise UnsupportedError(f"FSDPDynamoStrategy: expected {expected}, got {got}. {fix}")


class _LightningState:
    """Lightning's own state (loops, callbacks, hyperparameters) as an object to save."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


__all__ = ["FSDPDynamoStrategy"]
