"""Every wait for other ranks ends when one of them fails, and says which one and why."""

from __future__ import annotations

import ast
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Transformer, batch, loss_of, make_transformer, wrap
from pool import on_ranks
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TensorPart
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_dynamo import FSDP, RankFailedError, ShardingStrategy, checkpoint, fully_shard
from fsdp_dynamo.comm import watchdog
from fsdp_dynamo.errors import CheckpointError
from fsdp_dynamo.state_dict.conversion import broadcast_from_first, whole_tensor

PACKAGE = Path(__file__).parents[2] / "fsdp_dynamo"
LIMIT_S = 10.0  # the promise
PERIOD_S = 0.2  # of the watcher

Fail = Callable[[], None]
"""Raises on one rank."""


def _clip(model: Any, fail: Fail, folder: str) -> None:
    fail()
    model.clip_grad_norm_(1.0)


def _copy_a_dtensor(model: Any, fail: Fail, folder: str) -> None:
    layer: Any = fully_shard(nn.Linear(5, 4))
    otherwise = distribute_tensor(torch.zeros(4, 5), layer.weight.device_mesh, [Shard(1)])
    fail()
    layer.load_state_dict({"weight": otherwise}, strict=False)


def _summon(model: Any, fail: Fail, folder: str) -> None:
    fail()
    with FSDP.summon_full_params(model, with_grads=True):
        pass


def _update_whole(model: Any, fail: Fail, folder: str) -> None:
    def update(fqn: str, whole: torch.Tensor) -> torch.Tensor:
        fail()  # on its owner
        return whole

    model.update_whole({name: p.detach() for name, p in model.named_parameters()}, update)


def _broadcast(model: Any, fail: Fail, folder: str) -> None:
    fail()
    broadcast_from_first({"a": torch.ones(3)})


def _sharded_tensor(model: Any, fail: Fail, folder: str) -> None:
    rank = dist.get_rank()
    shards = [ShardMetadata([r, 0], [1, 2], f"rank:{r}/cpu") for r in range(2)]
    properties = TensorProperties(dtype=torch.float32)
    value = ShardedTensor._init_from_local_shards_and_global_metadata(
        [TensorPart(torch.ones(1, 2), shards[rank])],
        ShardedTensorMetadata(shards, torch.Size([2, 2]), properties),
    )
    fail()
    whole_tensor(value)


def _whole_dtensor(model: Any, fail: Fail, folder: str) -> None:
    value = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    fail()
    whole_tensor(value)


def _wrap_once_more(model: Any, fail: Fail, folder: str) -> None:
    """In a group that has no watch of its own yet."""
    group = dist.new_group([0, 1], use_local_synchronization=True)
    fail()
    FSDP(nn.Linear(3, 3), process_group=group, sync_module_states=True)


def _make_groups(model: Any, fail: Fail, folder: str) -> None:
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        fail()
        FSDP(nn.Linear(3, 3), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def _initialise(model: Any, fail: Fail, folder: str) -> None:
    """A rank fails when a unit has its values already."""
    with torch.device("meta"):
        plain = Transformer(num_blocks=2)
    last = plain.blocks[1].down

    def init(module: nn.Module) -> None:
        if module is last:
            fail()
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.zeros_(param)

    wrap(plain, param_init_fn=init, sync_module_states=True)


def _begin_to_save(model: Any, fail: Fail, folder: str) -> None:
    fail()
    checkpoint.save(folder, model, step=1)


def _save_once_more(model: Any, fail: Fail, folder: str) -> None:
    checkpoint.save(folder, model, step=1)
    fail()
    checkpoint.save(folder, model, step=2)


CASES: dict[str, Callable[[Any, Fail, str], None]] = {
    "clip_grad_norm_()": _clip,
    "copying a DTensor": _copy_a_dtensor,
    "summon_full_params()": _summon,
    "update_whole()": _update_whole,
    "a broadcast": _broadcast,
    "a ShardedTensor": _sharded_tensor,
    "a DTensor of torch's": _whole_dtensor,
    "wrapping": _wrap_once_more,
    "making groups": _make_groups,
    "deferred init": _initialise,
    "the first save": _begin_to_save,
    "another save": _save_once_more,
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_a_rank_that_fails_is_named(rank: int, tmp_path: Path, case: str) -> None:
    """Rank 1 raises, outside of what this package calls, and its process goes on."""

    def fail() -> None:
        if rank == 1:
            raise ValueError("as asked")

    store = dist.distributed_c10d._get_default_store()
    model = wrap(make_transformer(num_blocks=1))
    loss_of(model, batch(rank, 0)).backward()
    dist.barrier()
    began = time.monotonic()
    wanted = CheckpointError if "save" in case else RankFailedError
    with (
        mock.patch.object(watchdog, "PERIOD_S", PERIOD_S),
        pytest.raises(ValueError if rank == 1 else wanted) as raised,
    ):
        CASES[case](model, fail, str(tmp_path))
    error, seconds = raised.value, time.monotonic() - began
    if rank == 1:
        sys.excepthook(type(error), error, error.__traceback__)  # as if it was not caught
        store.wait(["learned"], timedelta(seconds=2 * LIMIT_S))
        return
    store.set("learned", "")
    assert "rank 1" in str(error)
    assert "ValueError: as asked" in str(error)
    assert seconds < LIMIT_S


# -- none is forgotten -----------------------------------------------------------------------------

_BLOCKING = re.compile(
    "all_gather.*|all_reduce|all_to_all.*|.*barrier|batch_isend_irecv|broadcast.*|gather.*|recv|"
    "reduce|reduce_scatter.*|scatter.*|send"
)
_WATCHES = ("watched", "Interruptible", "_reaching_all_ranks")


def _calls(node: ast.AST, is_watched: bool = False) -> Iterator[tuple[str, bool]]:
    """Functions of ``torch.distributed`` that communicate, and whether a watch is around them."""
    if isinstance(node, ast.With):
        names = [getattr(one.context_expr, "func", None) for one in node.items]
        is_watched |= any(getattr(n, "id", getattr(n, "attr", "")) in _WATCHES for n in names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if (
            isinstance(owner, ast.Name)
            and owner.id == "dist"
            and _BLOCKING.fullmatch(node.func.attr)
            and not any(keyword.arg == "async_op" for keyword in node.keywords)
        ):
            yield node.func.attr, is_watched
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, is_watched)


def test_every_collective_is_watched() -> None:
    """Those of ``comm`` are waited for by ``InFlight``."""
    text = "with watched(group, 'a', 'b'):\n    dist.barrier(group)\ndist.broadcast(x)\n"
    assert list(_calls(ast.parse(text))) == [("barrier", True), ("broadcast", False)]
    unwatched = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "comm"
        for name, is_watched in _calls(ast.parse(path.read_text()))
        if not is_watched
    }
    assert unwatched == set()


# -- the watcher itself ----------------------------------------------------------------------------


def test_the_watcher_survives_an_error() -> None:
    """It tells the error once, and checks the same wait again."""
    seen = threading.Semaphore(0)
    failing = True

    def look(*_: object, **__: object) -> None:
        seen.release()
        if failing:
            raise LookupError("as asked")

    with (
        mock.patch.object(watchdog, "PERIOD_S", 0.01),
        mock.patch.object(watchdog.warnings, "warn") as warn,
    ):
        watcher = watchdog._Watchdog()
        watcher.monitor = mock.Mock(look=look)
        watcher.begin(watchdog._Wait(mock.Mock(), mock.Mock()))
        try:
            for _ in range(3):
                assert seen.acquire(timeout=LIMIT_S)
            failing = False
            for _ in range(3):
                assert seen.acquire(timeout=LIMIT_S)
        finally:
            watcher.end()
            with mock.patch.object(watchdog, "_MAX_IDLE_PERIODS", 0):
                until = time.monotonic() + LIMIT_S
                while watcher._is_alive and time.monotonic() < until:
                    time.sleep(0.01)
    assert not watcher._is_alive
    warn.assert_called_once()
    (told,), _ = warn.call_args
    assert "begins anew" in told
    assert "LookupError: as asked" in told
