"""DeepSpeed ZeRO-3, where the package is installed."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.command_line import BadInputError
from benchmarks.peers.base import Peer, Setting, Trainee, missing_package
from benchmarks.workloads.catalogue import Batch


class _Zero3(Trainee):
    """DeepSpeed's engine owns backward and update."""

    def __init__(self, setting: Setting) -> None:
        if setting.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # It prints a banner on import and at each configuration.
        logging.disable(logging.WARNING)
        import deepspeed

        deepspeed.utils.logging.logger.setLevel(logging.ERROR)
        model = setting.model()
        torchs_linear = F.linear
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.make_optimizer(model),
            config=self._config(setting),
            dist_init_required=False,
        )
        logging.disable(logging.NOTSET)
        # It replaces the function for the whole process; the other peers of the run must not
        # get it (compiled ones recompile, and would measure another linear layer).
        self._linear, F.linear = F.linear, torchs_linear
        self.engine = engine
        self.model = engine
        self.workload = setting.workload
        self.optimizer = engine.optimizer

    @staticmethod
    def _config(setting: Setting) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "train_batch_size": dist.get_world_size(),
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        if setting.param_dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True}
        return config

    def forward(self, batch: Batch) -> torch.Tensor:
        torchs_linear, F.linear = F.linear, self._linear
        try:
            return super().forward(batch)
        finally:
            F.linear = torchs_linear

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


def deepspeed(backend: str | None) -> Peer:
    """ZeRO-3, eager.

    Raises:
        BadInputError: a backend: DeepCompile needs an accelerator and is not measured here.
    """
    if backend is not None:
        raise BadInputError(f"--deepspeed: expected no --dynamo, got {backend!r}")
    why_not = missing_package("deepspeed", "python tools/setup_env.py .venv --peers")
    return Peer("deepspeed", "DeepSpeed ZeRO-3", _Zero3, why_not)


PEERS = (deepspeed(None),)
