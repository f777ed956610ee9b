"""Memory of what collectives read and write: the user's, the process group's, symmetric memory.

No GPU is needed: ``torch.cuda``'s pools and NCCL's backend are replaced, collectives run on gloo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from loops import gradients, whole_gradients
from models import batch, loss_of, make_transformer
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from user_collectives import gather_of_the_user, scatter_of_the_user

import fsdp_dynamo
from fsdp_dynamo import (
    CPUOffload,
    FSDPStateError,
    MixedPrecision,
    ShardingStrategy,
    UnsupportedError,
    fully_shard,
)
from fsdp_dynamo.comm import collectives, point_to_point, registered_memory
from fsdp_dynamo.comm.registered_memory import RegisteredMemory
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.wrap import arguments

# -- allocate of the user's collectives ------------------------------------------------------------


def _shard(library: Any, param_dtype: torch.dtype | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    policy = library.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for module in (model[0], model):
        library.fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    return model


def _backwards(model: nn.Module, rank: int) -> None:
    for step in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).float().square().sum().backward()


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_users_allocations_are_those_of_torchs(rank: int, param_dtype: torch.dtype | None) -> None:
    """Of each call, by size, dtype and device; gradients have the bits of our collectives."""
    found = []
    for library in (upstream, fsdp_dynamo):
        model = _shard(library, param_dtype)
        gather, scatter = gather_of_the_user(), scatter_of_the_user()
        model[0].set_custom_all_gather(gather)
        model[0].set_custom_reduce_scatter(scatter)
        _backwards(model, rank)
        found.append((gather.allocated, scatter.allocated, gather.is_own, scatter.is_own))
    assert found[0] == found[1]
    assert found[1][2:] == ([True] * 4, [True] * 2)
    plain = _shard(fsdp_dynamo, param_dtype)
    _backwards(plain, rank)
    for name, grad in whole_gradients(plain).items():
        assert torch.equal(grad, whole_gradients(model)[name]), name


# -- pools -----------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Stands in for pools and for NCCL, and watches what collectives read and write.

    Attributes:
        outside: tensors of collectives that were allocated outside of the pool.
        unknown: tensors of collectives without a rendezvous.
        registered: groups with which pools were registered.
        num_pools: pools made.
        sizes: bytes of each allocation from a pool.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.unknown: list[str] = []
        self.registered: list[dist.ProcessGroup] = []
        self.sizes: list[int] = []
        self.num_pools = self.num_collectives = 0
        self._is_open = False
        self._inside: dict[int, bool] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(one) for one in tree_leaves((args, kwargs)) if _is_dense(one)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if _is_dense(made) and _address(made) not in given:
                self._allocated(made.untyped_storage())
        return result

    def _resize(self, storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        RESIZE(storage, num_bytes)
        self._allocated(storage)
        return storage

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        self._inside[storage.data_ptr()] = self._is_open
        if self._is_open:
            self.sizes.append(storage.nbytes())

    @contextmanager
    def _use_mem_pool(self, pool: object, device: torch.device) -> Iterator[None]:
        assert not self._is_open  # torch refuses to enter a pool twice
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _rendezvous(self, tensor: torch.Tensor, group_name: str) -> None:
        assert not self._is_open
        assert self._inside[_address(tensor)]
        self._known.add(_address(tensor))

    def _pool(self, allocator: object) -> object:
        assert allocator == "NCCL's"
        self.num_pools += 1
        return object()

    def _backend(self, group: dist.ProcessGroup, device: torch.device) -> Any:
        return SimpleNamespace(
            supports_tensor_alloc=lambda device: True,
            mem_allocator="NCCL's",
            register_mem_pool=lambda pool: self.registered.append(group),
        )

    def _watched(self, kind: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        def call(pairs: Any, *more: Any) -> Any:
            self.num_collectives += 1
            for pair in pairs:
                for side, tensor in zip(("whole", "part"), pair, strict=True):
                    if not self._inside.get(_address(tensor), False):
                        self.outside.append(f"{kind} {side}")
                    if _address(tensor) not in self._known:
                        self.unknown.append(f"{kind} {side}")
            self._known.clear()
            return issue(pairs, *more)

        return call

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        symm_mem = registered_memory.symm_mem
        with ExitStack() as stack:
            for owner, name, new in (
                (torch.cuda, "use_mem_pool", self._use_mem_pool),
                (torch.cuda, "MemPool", self._pool),
                (torch.cuda, "device", lambda device: nullcontext()),
                (torch.UntypedStorage, "resize_", lambda *given: self._resize(*given)),
                (registered_memory, "_backend", self._backend),
                (registered_memory, "has_symmetric_memory", lambda *_: True),
                (symm_mem, "set_backend", lambda name: None),
                (symm_mem, "get_mem_pool", lambda device: self._pool("NCCL's")),
                (symm_mem, "rendezvous", self._rendezvous),
                (
                    point_to_point,
                    "issue_all_gathers",
                    self._watched("gather", point_to_point.issue_all_gathers),
                ),
                (
                    point_to_point,
                    "issue_exchanges",
                    self._watched("reduce", point_to_point.issue_exchanges),
                ),
            ):
                stack.enter_context(mock.patch.object(owner, name, new))
            with self:
                yield


RESIZE = torch.UntypedStorage.resize_


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, nn.Parameter)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


LOW = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
CASES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "low precision": LOW,
    "hybrid": {"strategy": ShardingStrategy.HYBRID_SHARD} | LOW,
    "on nodes": {"strategy": ShardingStrategy.HIERARCHICAL_SHARD},
    "gathered again among few": {"reshard_after_forward": 2},
    "offloaded": {"cpu_offload": CPUOffload(True)},
}
SETTERS: dict[str, Callable[[Any], None]] = {
    "group": lambda unit: unit.set_allocate_memory_from_process_group_for_comm(True),
    "symmetric": lambda unit: unit.set_symm_mem_for_comm(),
}


def _model(case: str, direct_bytes: int | None = 512) -> Any:
    kwargs = CASES[case]
    if "strategy" in kwargs:
        kwargs = kwargs | {"mesh": init_device_mesh("cpu", (2, 2))}
    model: Any = make_transformer(num_blocks=2)
    with (  # by default, some parameters are packed, some are not
        mock.patch.dict(collectives.DIRECT_BYTES, {"point_to_point": direct_bytes}),
        mock.patch.object(arguments, "offloads", lambda given, device: given.offload_params),
    ):
        for block in model.blocks:
            fully_shard(block, **kwargs)
        fully_shard(model, **kwargs)
    for unit in (*model.blocks, model):
        unit.set_force_sum_reduction_for_comms(True)
    return model


def _train(model: Any, rank: int) -> dict[str, torch.Tensor]:
    """Whole gradients of steps with and without reductions, among them a frozen parameter's."""
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(rank, 0)).backward()
    model.set_requires_gradient_sync(True)
    model.blocks[0].up.bias.requires_grad_(False)
    for step in (1, 2):
        loss_of(model, batch(rank, step)).backward()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(rank, 3)).backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    return gradients(model)


@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("group", case) for case in CASES), ("symmetric", "sharded"), ("symmetric", "on nodes")],
)
@on_ranks(4)
def test_collectives_use_the_pool(rank: int, kind: str, case: str) -> None:
    """For all that they read and write; gradients have the bits of torch's default memory."""
    expected = _train(_model(case), rank)
    model, recorder = _model(case), _Recorder()
    with recorder.standing_in():
        for unit in (*model.blocks, model):
            SETTERS[kind](unit)
        got = _train(model, rank)
        assert recorder.outside == []
        assert recorder.num_collectives > 10
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        if kind == "group":
            for unit in (*model.blocks, model):
                unit.set_allocate_memory_from_process_group_for_comm(False)
            loss_of(model, batch(rank, 4)).backward()
            assert "gather whole" in recorder.outside
    groups = set(model._fsdp_unit.config.groups.communicators)
    if kind == "symmetric":
        assert recorder.unknown == []
    else:
        assert recorder.num_pools == 1
        assert len(recorder.registered) == len(groups)
        assert set(recorder.registered) == groups


@on_ranks(2)
def test_ranks_allocate_alike(rank: int) -> None:
    """Symmetric memory needs that, whatever gradients a rank has."""
    model, recorder = _model("low precision", direct_bytes=None), _Recorder()
    if rank == 1:  # no gradients for some parameters of a block
        model.blocks[0].down.register_forward_hook(lambda module, given, out: out.detach())
    with recorder.standing_in():
        for unit in (*model.blocks, model):
            SETTERS["symmetric"](unit)
        loss_of(model, batch(rank, 0)).backward()
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, recorder.sizes)
    assert everywhere[0] == everywhere[1]
    assert recorder.unknown == recorder.outside == []


@on_ranks(2)
def test_memory_is_changed_between_steps(rank: int) -> None:
    """Buffers that exist are freed; copies share the pool, not buffers; means use other memory."""
    model, recorder = _model("sharded"), _Recorder()
    model.set_keep_unsharded_storage(True)
    model.unshard()
    with recorder.standing_in():
        for unit in (*model.blocks, model):
            SETTERS["symmetric"](unit)
            unit.set_force_sum_reduction_for_comms(False)
        copied = copy.deepcopy(model)
        assert not any(flat.is_allocated for flat in model._fsdp_unit.flats)
        loss_of(copied, batch(rank, 0)).backward()
        assert {one.split()[0] for one in recorder.outside} == {"reduce"}
        with pytest.raises(FSDPStateError, match="memory of another kind"):
            SETTERS["group"](model)
        with pytest.raises(UnsupportedError, match="got 'CUDA'"):
            model.set_symm_mem_for_comm("CUDA")


# -- planted faults --------------------------------------------------------------------------------


def _outside(module: str) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch(f"fsdp_dynamo.{module}.allocating", return_value=nullcontext())


FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "an unsharded buffer": ("gather whole", _outside("core.unit")),
    "a message of a gather": ("gather whole", _outside("comm.collectives")),
    "a shard that is sent": (
        "gather part",
        lambda: mock.patch.object(FlatParameter, "shard_to_gather", FlatParameter.shard_on_device),
    ),
    "a gradient": ("reduce whole", _outside("core.flat_parameter")),
    "a reduced shard": (
        "reduce part",
        lambda: mock.patch.object(
            FlatParameter, "new_shard", lambda flat, plan, grad: plan.new_shard(grad)
        ),
    ),
    "a window": (
        "gather whole",
        lambda: mock.patch.object(RegisteredMemory, "prepare", return_value=None),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_faults_are_reported(rank: int, fault: str) -> None:
    """Each leaves one kind of tensor out of the pool, or unknown to other ranks."""
    reported, plant = FAULTS[fault]
    kind = "symmetric" if fault == "a window" else "group"
    model, recorder = _model("sharded"), _Recorder()
    with recorder.standing_in(), plant():
        for unit in (*model.blocks, model):
            SETTERS[kind](unit)
        _train(model, rank)
    assert reported in (recorder.unknown if fault == "a window" else recorder.outside)
