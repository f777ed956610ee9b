"""``transformers.Trainer`` on fsdp_dynamo.

    sharding = Sharding(layers=["LlamaDecoderLayer"])
    trainer = FSDPTrainer(model, args, train_dataset=..., sharding=sharding)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model("model")  # for from_pretrained()

Accelerate wraps models in ``DistributedDataParallel`` or torch's FSDP and has no hook for other
wrappers, but it skips models that are marked as prepared. So this Trainer shards the model itself
before the optimizer is created, and overrides what needs whole parameters: gradient clipping,
checkpoints, and the move to the device.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from fsdp_dynamo import checkpoint
from fsdp_dynamo.api import FullStateDictConfig, MixedPrecision, StateDictType
from fsdp_dynamo.checkpoint.states import random_state, set_random_state
from fsdp_dynamo.errors import (
    CheckpointError,
    FSDPStateError,
    UnsupportedError,
    how_to_install,
)
from fsdp_dynamo.integrations.sharding import Sharding, shard
from fsdp_dynamo.wrap.composable import FSDPModule
from fsdp_dynamo.wrap.wrapper import FullyShardedDataParallel

_REFUSED = {
    "fp16": "Use bf16=True, or Sharding(mixed_precision=...).",
    "fp16_full_eval": "Use Sharding(mixed_precision=...).",
    "bf16_full_eval": "Use Sharding(mixed_precision=...).",
    "torch_compile": "Use Sharding(compile={'backend': ...}).",
    "auto_find_batch_size": "Choose per_device_train_batch_size.",
    "fsdp": "Leave it out; FSDPTrainer shards by itself.",
    "deepspeed": "Leave it out; FSDPTrainer shards by itself.",
}
"""Training arguments that conflict with sharding, and what to use instead."""


class FSDPTrainer(Trainer):  # type: ignore[misc]
    """``Trainer`` that shards the model in place before it first trains or evaluates.

    To combine it with another Trainer: ``class Mine(FSDPTrainer, Seq2SeqTrainer)``.

    Args:
        arguments: positional arguments of ``Trainer``. ``bf16=True`` computes in bfloat16 and
            reduces in float32.
        sharding: how to shard, and whether to compile.
        named: keyword arguments of ``Trainer``.

    Raises:
        UnsupportedError: a training argument does not work with sharding, or accelerate is
            configured to shard as well.
    """

    def __init__(self, *arguments: Any, sharding: Sharding | None = None, **named: Any) -> None:
        self.sharding = sharding or Sharding()
        self._random: dict[str, Any] | None = None
        self._numel = 0
        self._is_ready = False
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse settings that would shard a second time; otherwise as in ``Trainer``.

        Raises:
            UnsupportedError: see the class.
        """
        _check(self.args)
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise UnsupportedError(
                "FSDPTrainer: expected a launcher that leaves sharding to FSDPTrainer, got "
                "settings of accelerate for FSDP or DeepSpeed. Start the script with torchrun."
            )

    # -- the model ---------------------------------------------------------------------------------

    def shard(self) -> None:
        """Shard the model once, and mark it so that accelerate does not wrap it again."""
        if self._is_ready:
            return
        self._is_ready = True
        sharding = self.sharding
        if self.args.bf16 and sharding.mixed_precision is None:
            low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            sharding = replace(sharding, mixed_precision=low)
        self._numel = _numel_of(shard(self.model, sharding, self.args.device))
        self.model._is_accelerate_prepared = True
        if hasattr(self.model, "generate"):
            self.model.register_forward_method("generate")

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shard the model first; otherwise as in ``Trainer``."""
        self.shard()
        made: torch.optim.Optimizer = super().create_optimizer(model)
        return made

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """Shard the model first; otherwise as in ``Trainer``."""
        self.shard()
        return super().evaluation_loop(*arguments, **named)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: sharding moves the model unit by unit."""

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the FLOPs of a step on one rank's inputs: 6 per token and non-embedding element.

        ``Trainer`` would count the elements of this rank's shards only.
        """
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if tokens is None else 6 * int(tokens.numel()) * self._numel

    # -- gradients ---------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.model.clip_grad_norm_(self.args.max_grad_norm)  # type: ignore[no-any-return]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # -- saving ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model for ``from_pretrained()``; every rank must call it.

        Checkpoints contain these files only with ``save_only_model``.
        """
        folder = output_dir or self.args.output_dir
        if _internal_call and not self.args.save_only_model:
            # Trainer requires this folder when it records the best checkpoint, before it saves
            # the rest.
            Path(folder).mkdir(parents=True, exist_ok=True)
            return
        self.shard()
        one_writes = not self.args.save_on_each_node
        form = FullStateDictConfig(offload_to_cpu=True, rank0_only=one_writes)
        full = StateDictType.FULL_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(self.model, full, form):
            state = self.model.state_dict()
        self._save(folder, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(
            Path(output_dir) / FOLDER,
            self.model,
            self._optimizer(),
            step=self.state.global_step,
            shared={"scheduler": self.lr_scheduler},
            keep_last=1,
        )

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: our checkpoint contains the random state."""

    # -- loading -----------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any
    ) -> Any:
        """Train as ``Trainer`` does, with its ``arguments`` and ``named`` arguments.

        ``resume_from_checkpoint=True`` skips incomplete folders.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *arguments, **named)

    def _load_from_checkpoint(self, path: str, model: nn.Module | None = None) -> None:
        if not is_ours(path):  # ours is loaded together with the optimizer's state, later
            super()._load_from_checkpoint(path, model)

    def _load_optimizer_and_scheduler(self, path: str | None) -> None:
        if path is None:
            return
        if is_ours(path):
            shared = {"scheduler": self.lr_scheduler}
            self._random = _load(path, self.model, self._optimizer(), shared=shared)
            return
        for name in ("optimizer.pt", "optimizer.bin"):
            if (Path(path) / name).exists():
                raise CheckpointError(
                    f"checkpoint '{path}': expected a folder '{FOLDER}' with a checkpoint of "
                    f"FSDPTrainer, got '{name}' of another Trainer, whose states are of whole "
                    "parameters. Load its model with from_pretrained() and start a new training."
                )

    def _load_rng_state(self, path: str | None) -> None:
        if path is not None and self._random is not None:
            set_random_state(self._random)

    def _load_best_model(self) -> None:
        path = self.state.best_model_checkpoint
        if is_ours(path):
            _load(path, self.model)
        else:
            super()._load_best_model()

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that accelerate has wrapped."""
        optimizer: Any = self.optimizer
        found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return found


def _numel_of(model: FSDPModule) -> int:
    """Number of elements of all parameters on all ranks, embeddings excluded."""
    modules = model.named_modules()
    embeddings = {f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)}
    return sum(
        slot.numel
        for unit in model._fsdp_root.units
        for flat in unit.flats
        for slot in flat.layout.slots
        if unit.paths.fqn_of(slot.fqn) not in embeddings
    )


def _check(args: TrainingArguments) -> None:
    for name, fix in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise UnsupportedError(
                f"FSDPTrainer: expected training arguments without {name}, got {name}={value!r}. "
                f"{fix}"
            )


_OWN = {"shard", "_optimizer"}


def _check_trainer() -> None:
    """Raise if the installed ``Trainer`` has no method of a name that is overridden here."""
    overridden = {name for name in vars(FSDPTrainer) if not name.startswith("__")} - _OWN
    missing = sorted(name for name in overridden if not hasattr(Trainer, name))
    if missing:
        import transformers

        raise FSDPStateError(
            f"fsdp_dynamo.integrations.trainer: expected a Trainer with the method {missing[0]}, "
            f"got transformers {transformers.__version__}, whose Trainer has none. Run "
            f"{how_to_install('trainer')}."
        )


_check_trainer()


# -- trainer files ---------------------------------------------------------------------------------
# Layout of a checkpoint of ``transformers.Trainer``, which contains one of ours.
#
# ::
#
#     output_dir/
#         checkpoint-100/
#             fsdp_dynamo/000001-step-100/    model, optimizer, scheduler, random numbers by rank
#             trainer_state.json              written last, by Trainer


FOLDER = "fsdp_dynamo"
STATE = "trainer_state.json"


def is_ours(path: str | Path) -> bool:
    """Return whether a Trainer's checkpoint contains a complete checkpoint of ours."""
    return bool(checkpoint.complete(Path(path) / FOLDER))


def newest(output_dir: str | Path) -> str | None:
    """Return the complete checkpoint of the highest step in a Trainer's output folder, if any."""
    folders = {
        int(match[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    for step in sorted(folders, reverse=True):
        if is_ours(folders[step]) and _is_readable(folders[step] / STATE):
            return str(folders[step])
    return None


def _is_readable(path: Path) -> bool:
    """Return whether Trainer has completed writing its state, a JSON file."""
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def _load(
    path: str | Path, model: nn.Module, *optimizers: torch.optim.Optimizer, **states: Any
) -> dict[str, Any] | None:
    """Restore a checkpoint, but leave the random state to be restored when training resumes.

    Returns:
        This rank's saved random state; ``None`` if another number of ranks saved the checkpoint.
    """
    before = random_state()
    loaded = checkpoint.load(Path(path) / FOLDER, model, optimizers, **states)
    saved = random_state()
    set_random_state(before)
    return saved if loaded is not None and loaded.is_exact else None


__all__ = ["FSDPTrainer", "newest"]
