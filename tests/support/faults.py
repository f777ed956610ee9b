"""Faults of one rank: a place in the step, and what happens there once.

A model whose forward, backward and tracing pass such places also when they are compiled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from models import Transformer

PLACES = ("data", "trace", "forward", "backward", "hook", "optimizer", "save")
"""``trace``: while the first graph is made; ``save``: while a rank writes its part."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Attributes:
        kind: "raise", "kill", "stop" (SIGSTOP, and SIGCONT after ``seconds``), or one that no place
            knows.
        place: one of ``PLACES``.
        seconds: how long it lasts.
    """

    kind: str
    place: str
    seconds: float = 0.0


_armed: tuple[Fault, Path] | None = None


def arm(fault: Fault | None, folder: Path | None = None) -> None:
    """Let a fault happen when this rank next comes to its place; ``None``: none.

    Args:
        folder: where a file "fault" is made right before.
    """
    global _armed
    _armed = None if fault is None or folder is None else (fault, folder)


def happened_at(folder: Path) -> float | None:
    """When, by the clock of ``time.monotonic``, which is the same in all processes."""
    path = folder / "fault"
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None


def place(name: str) -> None:
    """This rank is at a place."""
    if _armed is None or _armed[0].place != name:
        return
    fault, folder = _armed
    arm(None)
    draft = folder / "fault.part"
    draft.write_text(str(time.monotonic()))
    draft.rename(folder / "fault")
    if fault.kind == "raise":
        raise ValueError(f"as asked in {name}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "stop":
        wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


@torch.library.custom_op("faults::anywhere", mutates_args=())
def _anywhere(x: torch.Tensor) -> torch.Tensor:
    place("forward")
    return x.clone()


@torch.library.custom_op("faults::anywhere_in_backward", mutates_args=())
def _in_backward(grad: torch.Tensor) -> torch.Tensor:
    place("backward")
    return grad.clone()


@_anywhere.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    place("trace")
    return torch.empty_like(x)


_in_backward.register_fake(torch.empty_like)
_anywhere.register_autograd(lambda ctx, grad: _in_backward(grad))


class FaultyTransformer(Transformer):
    """A transformer that passes the places of its forward and backward after each block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = _anywhere(block(x))
        return self.head(self.norm(x)) * self.scale


def uncaught(error: Exception) -> None:
    """Handle an exception as the interpreter does if it is not caught."""
    sys.excepthook(type(error), error, error.__traceback__)
