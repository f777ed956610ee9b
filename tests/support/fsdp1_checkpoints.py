"""Checkpoints that one of the two libraries writes and the other one reads.

Through ``torch.distributed.checkpoint``, in sharded form, over a device mesh: FSDP1's values are
``DTensor``s.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp1_programs import Program, draw, map_leaves
from fsdp1_sides import FSDP1, OURS, PREFIX, Api, Side
from module_trees import Leaf
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

_CALLS = (("train", 0), ("step",), ("zero_grad", "optimizer", True), ("train", 1), ("step",))


_LEFT_OUT = ("batchnorm", "buffer", "spare")
"""Buffers differ between ranks; FSDP1 gives parameters without a gradient a state."""


def draw_crossing(seed: int) -> Program:
    """A model whose parameters all have a part in the loss, and steps that leave states."""
    program = draw(seed)
    tree = map_leaves(program.tree, lambda leaf: replace(leaf, kind=_kind_of(leaf)))
    return replace(program, tree=tree, calls=_CALLS, momentum=0.9, precision="none")


def _kind_of(leaf: Leaf) -> str:
    return "linear" if leaf.kind in _LEFT_OUT else leaf.kind


class MeshSide(Side):
    """A side over a device mesh, with whole checkpoints."""

    def _arguments(self, plain: nn.Module) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        return {**super()._arguments(plain), "process_group": None, "device_mesh": mesh}

    def _states(self) -> dict[str, Any]:
        fsdp = self.api.fsdp
        with self._state_type("SHARDED"):
            model = self.model.state_dict()
            return {"model": model, "optim": fsdp.optim_state_dict(self.model, self.optimizer)}

    def save_files(self, folder: str) -> None:
        states = self._states()
        if self.api is FSDP1 and self.program.strategy != "NO_SHARD":
            assert any(isinstance(value, DTensor) for value in states["model"].values())
        dcp.save(states, checkpoint_id=folder)

    def load_files(self, folder: str) -> None:
        """Into other values and other states."""
        states = self._states()
        dcp.load(states, checkpoint_id=folder)
        fsdp = self.api.fsdp
        with self._state_type("SHARDED"):
            self.model.load_state_dict(states["model"])
            given = fsdp.optim_state_dict_to_load(self.model, self.optimizer, states["optim"])
        self.optimizer.load_state_dict(given)

    def start(self, seed: int) -> None:
        """Wrap, and run the program's calls with batches from ``seed`` on."""
        self.wrap()
        for name, *arguments in self.program.calls:
            getattr(self, name)(*([arguments[0] + seed] if name == "train" else arguments))

    def whole(self) -> dict[str, torch.Tensor]:
        with self.api.fsdp.summon_full_params(self.model, writeback=False):
            named = [*self.model.named_parameters(), *self.model.named_buffers()]
            return {name.replace(PREFIX, ""): value.detach().clone() for name, value in named}


def crossings(
    rank: int, world_size: int, programs: Iterable[Program], folder: str
) -> tuple[int, list[str]]:
    """How many programs count, which are those whose files FSDP1 itself reads; what differs."""
    count, different = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, program in enumerate(programs):
            pairs = ((FSDP1, FSDP1), (FSDP1, OURS), (OURS, FSDP1))
            own, *others = (
                _agreed(_crossing(program, *pair, rank, f"{folder}/{number}-{i}"))
                for i, pair in enumerate(pairs)
            )
            if not own:
                count += 1
                different += [f"{program}\n{text}" for texts in others for text in texts]
    return count, different


def _agreed(texts: Iterable[str]) -> list[str]:
    """What any rank has found."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(texts))
    return list(dict.fromkeys(text for of_rank in gathered for text in of_rank))


def _crossing(program: Program, writer: Api, reader: Api, rank: int, folder: str) -> Iterator[str]:
    """What differs after ``reader`` has loaded what ``writer`` has saved, and a step later."""
    way = f"from {writer.name} to {reader.name}, "
    first, second = MeshSide(program, writer, rank), MeshSide(program, reader, rank)
    try:
        first.start(0)
        first.save_files(folder)
        second.start(3)
        second.load_files(folder)
        yield from _different(f"{way}loaded", first.whole(), second.whole())
        for side in (first, second):
            side.zero_grad("optimizer", True)
            side.train(2)
            side.step()
        yield from _different(f"{way}a step later", first.whole(), second.whole())
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # part of what is found
        yield f"{way}{type(error).__name__}: {str(error)[:300]}"


def _different(
    when: str, want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]
) -> Iterator[str]:
    if sorted(want) != sorted(got):
        yield f"{when}: names {sorted(want)}, {sorted(got)}"
    for name in sorted(want.keys() & got.keys()):
        if not torch.allclose(want[name], got[name], 1e-4, 1e-6, equal_nan=True):
            yield f"{when}: {name}: {want[name].flatten()[:4]}, {got[name].flatten()[:4]}"
