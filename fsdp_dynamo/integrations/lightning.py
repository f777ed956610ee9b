"""``lightning.pytorch.Trainer`` on fsdp_dynamo.

    strategy = FSDPDynamoStrategy(Sharding(layers=["Block"]))
    trainer = Trainer(strategy=strategy, gradient_clip_val=1.0, callbacks=[ModelCheckpoint("run")])
    trainer.fit(module, loader, ckpt_path="last")

Lightning starts the ranks and owns the loops. The strategy shards the module before optimizers are
made, and overrides the methods that need whole parameters: the norm of gradients, and checkpoints.
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
    """Shards the ``LightningModule``, in place, when it is first trained or evaluated.

    In eager a step runs with the root unit's parameters unsharded, so it may call submodules.
    With ``Sharding(compile=...)`` the module's ``forward`` is what is compiled: steps must call
    ``self(...)`` for whatever has parameters.

    Args:
        sharding: how to shard, and whether to compile.
        process_group_backend: as for ``DDPStrategy``; a process group that exists is used.
        timeout: of collectives, as for ``DDPStrategy``.

    Raises:
        UnsupportedError: when the Trainer is run: one of its arguments, or a property of the
            module, does not go with sharding. Nothing was changed.
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
        Strategy.setup(self, trainer)  # DDPStrategy's would wrap, or send rank 0's shards
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_norm

    def model_to_device(self) -> None:
        """Do nothing: sharding moves the model unit by unit."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        shard(model, self.sharding, self.root_device)
        return model.to(self.root_device)  # modules without parameters, such as metrics

    def teardown(self) -> None:
        """Leave the module on its device: shards on the CPU could not be gathered."""
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
        """Run a step: as the root unit's forward in eager; compiled, ``self(...)`` is that."""
        if self.sharding.compile is not None:
            return step(*arguments, **named)
        return self.lightning_module._fsdp_run_method(step, *arguments, **named)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While open, gradients accumulate unsharded, without communication."""
        with self.lightning_module.no_sync():
            yield

    def _clip_grad_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        self.lightning_module.clip_grad_norm_(clip_val)

    # -- checkpoints -------------------------------------------------------------------------------

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: each rank writes its part in ``save_checkpoint``."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Empty: each rank writes its part in ``save_checkpoint``."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: ``load_checkpoint`` has restored it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of ``fsdp_dynamo.checkpoint`` into the folder ``filepath``.

        Raises:
            CheckpointError: see ``checkpoint.save``.
            UnsupportedError: ``storage_options``, or hyperparameters that are no plain data.
        """
        is_default = storage_options is None
        _require(is_default, "no storage_options", storage_options, "Leave them out.")
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        path, step = self.broadcast(filepath), checkpoint["global_step"]
        shared = {"lightning": _LightningState(checkpoint)}
        module = self.lightning_module
        checkpoints.save(path, module, optimizers, step=step, shared=shared, keep_last=1)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Put back the model and, in ``fit``, the optimizers; Lightning puts back what is returned.

        Raises:
            CheckpointError: see ``checkpoint.load``, or another strategy has written it.
        """
        path, held, module = (
            self.broadcast(checkpoint_path),
            _LightningState({}),
            self.lightning_module,
        )
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if is_fitting else []
        checkpoints.load(path, module, optimizers, shared={"lightning": held})
        return held.state

    # -- unsupported arguments ---------------------------------------------------------------------

    def _require_supported(self, model: pl.LightningModule) -> None:
        plugin, io = self.precision_plugin, self.checkpoint_io
        is_known = type(plugin) in _PRECISIONS and getattr(plugin, "scaler", None) is None
        fix = "Use precision='bf16-mixed', or Sharding(mixed_precision=...)."
        _require(is_known, "a precision without gradient scaler", type(plugin).__name__, fix)
        is_default = type(io) is TorchCheckpointIO
        _require(is_default, "no CheckpointIO plugin", type(io).__name__, "Leave it out.")
        fix = "Call nn.SyncBatchNorm.convert_sync_batchnorm(module) before."
        _require(self._layer_sync is None, "modules as they are", "sync_batchnorm=True", fix)
        is_plain = model._compiler_ctx is None
        fix = "Use Sharding(compile={'backend': ...})."
        _require(is_plain, "a module that is not compiled", "one of torch.compile", fix)
        is_automatic, fix = model.automatic_optimization, "Return the loss from training_step."
        _require(is_automatic, "automatic optimization", "automatic_optimization=False", fix)
        has_forward = type(model).forward is not pl.LightningModule.forward
        runs, fix = has_forward or self.sharding.compile is None, "Call self(...) in training_step."
        _require(runs, "a module with forward, which is compiled", "one without", fix)


def _require(is_met: bool, expected: str, got: object, fix: str) -> None:
    where = "FSDPDynamoStrategy"
    if not is_met:
        raise UnsupportedError(f"{where}: expected {expected}, got {got}. {fix}")


class _LightningState:
    """State that Lightning saves besides the tensors of model and optimizers."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


__all__ = ["FSDPDynamoStrategy"]
