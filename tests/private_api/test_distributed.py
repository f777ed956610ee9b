"""Distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

CPU = torch.device("cpu")
WORLD_SIZE = 8

# -- groups ---------------------------------------------------------------------------------------


@pytest.mark.private(
    "torch.distributed.distributed_c10d._resolve_process_group",
    need="the process group of a graph's node, which has the group's name only",
    instead="a table of our own from names to groups, filled while a graph is traced",
)
def test_a_name_leads_to_its_group(group: dist.ProcessGroup) -> None:
    other = dist.new_group([0])
    for one in (group, other):
        assert dist.distributed_c10d._resolve_process_group(one.group_name) is one
    assert other is not group


@pytest.mark.private(
    "torch.distributed.distributed_c10d._get_default_store",
    need="the store of all ranks, in which they compare what they do; no public function returns "
    "the store that init_process_group has made",
    instead="a TCPStore of our own: rank 0 opens it and sends its address with "
    "broadcast_object_list",
)
def test_the_default_store_is_the_one_of_all_ranks(tmp_path: Path) -> None:
    given = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=given, rank=0, world_size=1)
    try:
        default = store = dist.distributed_c10d._get_default_store()
        dist.PrefixStore("ours", default).set("key", "value")
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        assert type(store).__name__ == "FileStore"
        assert dist.PrefixStore("ours", default).get("key") == b"value"
    finally:
        dist.destroy_process_group()


@pytest.mark.private(
    "ProcessGroup._get_backend",
    need="the backend that serves a device, by which a transport is chosen; get_backend knows "
    "names only, and a group may have several",
    instead="torch.distributed.get_backend_impl, public from torch 2.14 on",
)
def test_a_device_leads_to_its_backend(group: dist.ProcessGroup) -> None:
    backend = group._get_backend(CPU)
    assert backend.name() == "gloo"
    assert type(backend).__name__ == "ProcessGroupGloo"


@pytest.mark.private(
    "ProcessGroup._device_types",
    need="the devices that a group serves",
    instead="the devices in the text of torch.distributed.get_backend_config(group)",
)
def test_a_group_knows_its_devices(group: dist.ProcessGroup) -> None:
    assert CPU in group._device_types
    assert {group._get_backend(one).name() for one in group._device_types} == {"gloo"}


@pytest.mark.private(
    "Backend.Options._timeout",
    need="the timeout that a group was made with; no public function returns it",
    instead="an argument of ours, with torch.distributed.constants.default_pg_timeout by default",
)
def test_a_backend_knows_its_timeout() -> None:
    within = timedelta(seconds=123)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=within)
    try:
        group = dist.group.WORLD
        backend = group._get_backend(group._device_types[0])
        assert backend.options._timeout.total_seconds() == 123
    finally:
        dist.destroy_process_group()


# -- collectives ----------------------------------------------------------------------------------

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
_KINDS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "reduce_scatter": partial(_reduce_scatter, op=dist.ReduceOp.SUM),
    "all_reduce": lambda output, sent, **named: dist.all_reduce(
        output.copy_(sent), dist.ReduceOp.SUM, **named
    ),
}


@pytest.mark.private(
    "torch.distributed.distributed_c10d._coalescing_manager",
    need="several collectives as one call of the backend; its coalesced calls have no public name",
    instead="one call for each collective: options that join launches do nothing then",
)
@pytest.mark.parametrize("kind", _KINDS)
def test_several_collectives_are_one_launch(group: dist.ProcessGroup, kind: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    launches: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                launches.append(func.name())
            return func(*args, **(kwargs or {}))

    inputs = [torch.full((size,), float(size)) for size in (2, 3)]
    outputs = [torch.zeros_like(one) for one in inputs]
    coalesced = dist.distributed_c10d._coalescing_manager(group, async_ops=True)
    with Noting(), coalesced as work:
        for output, sent in zip(outputs, inputs, strict=True):
            _KINDS[kind](output, sent, group=group, async_op=True)
        assert not launches
    work.wait()
    assert len(launches) == 1
    assert all(map(torch.equal, outputs, inputs))


# -- modules of others ----------------------------------------------------------------------------


@pytest.mark.private(
    "torch.distributed._composable.contract._get_registry",
    need="whether torch's own composable replicate manages a module, which is then left to it; "
    "no public function says so",
    instead="an argument: users name such modules in ignored_modules",
)
def test_a_module_says_that_torch_replicates_it(group: dist.ProcessGroup) -> None:
    from torch.distributed._composable.contract import _get_registry
    from torch.distributed._composable.replicate import replicate

    module = nn.Linear(2, 2)
    assert "replicate" not in (_get_registry(module) or ())
    replicate(module)
    assert "replicate" in (_get_registry(module) or ())
    assert "replicate" not in (_get_registry(nn.Linear(2, 2)) or ())


@pytest.mark.private(
    "torch.distributed._composable.contract.STATE_KEY",
    need="stages of torch.distributed.pipelining end the backwards of FSDP2's modules through "
    "fully_shard.state(module), up to torch 2.14; no public function sets that",
    instead="users of such a torch end them: stage.submod.finalize_backward() after each step",
)
def test_a_modules_state_is_ours() -> None:
    from torch.distributed.fsdp import fully_shard

    from fsdp_dynamo.wrap.build import set_composable_state

    module, state = nn.Linear(2, 2), object()
    set_composable_state(module, fully_shard, state)
    assert fully_shard.state(module) is state  # type: ignore[attr-defined]


@pytest.mark.private(
    "torch.distributed._composable.contract.REGISTRY_KEY",
    "torch.distributed._composable.contract.RegistryItem",
    need="torch's replicate leaves out modules that say that fully_shard was called on them; no "
    "public function lets another one's say so",
    instead="replicate(model, ignored_modules=[block, ...]), which users write",
)
def test_torchs_replicate_leaves_units_out() -> None:
    from torch.distributed._composable.replicate import _is_fully_sharded
    from torch.distributed.fsdp import fully_shard

    from fsdp_dynamo.wrap.build import set_composable_state

    module = nn.Linear(2, 2)
    assert not _is_fully_sharded(module)
    set_composable_state(module, fully_shard, object())
    assert _is_fully_sharded(module)


@pytest.mark.private(
    "torch.distributed.fsdp.wrap._Policy._run_policy",
    need="upstream's policies, of torch.distributed.fsdp.wrap, as auto_wrap_policy; those with "
    "overrides have no public way to be asked",
    instead="policies of our own in fsdp_dynamo.wrap_policy, whose arguments are the same",
)
@pytest.mark.parametrize("kind", ["ModuleWrapPolicy", "CustomPolicy"])
def test_upstream_policies_choose_modules(kind: str) -> None:
    from torch.distributed.fsdp import wrap

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    overrides: dict[str, Any] = {}
    policy: Any = wrap.ModuleWrapPolicy({nn.Linear})
    if kind == "CustomPolicy":
        overrides = {"forward_prefetch": True}
        policy = wrap.CustomPolicy(lambda one: isinstance(one, nn.Linear) and overrides)
    found = dict(policy._run_policy(model, {model[3]}, {}))
    assert found == {model[0]: overrides, model[2]: overrides}


@pytest.mark.private(
    "CheckpointWrapper._checkpoint_wrapped_module",
    need="the module inside an activation-checkpoint wrapper: a unit goes around the wrapper, "
    "whose name is in no FQN",
    instead="the wrapper's new name in module_tree.WRAPPER_NAMES and wrap_policy._shells",
)
def test_a_checkpoint_wrapper_holds_its_module_by_name() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Linear(2, 2)
    model = nn.Sequential(checkpoint_wrapper(inner))
    assert model[0]._modules == {"_checkpoint_wrapped_module": inner}
    assert [name for name, _ in model.named_modules()][-1] == "0._checkpoint_wrapped_module"


@pytest.mark.private(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing",
    need="activation checkpointing of chosen modules in benchmarks, the same for all peers",
    instead="torch.utils.checkpoint.checkpoint(use_reentrant=False) around each block's forward",
)
def test_chosen_modules_are_recomputed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    class Block(nn.Linear):
        num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return super().forward(x).sin()

    block, head = Block(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(block, head)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    model(torch.ones(1, 2)).sum().backward()
    assert block.num_calls == 2
    assert block.weight.grad is not None
    assert model[1] is head


# -- groups without other ranks, for benchmarks ---------------------------------------------------


class _GroupInPython(dist.ProcessGroup):
    """A group without a backend in C++."""

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "in_python"

    def getGroupName(self) -> str:  # noqa: N802  # torch's name
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name  # noqa: N815  # torch's name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]


@pytest.fixture
def backend_in_python() -> Iterator[str]:
    """The name of a backend whose groups are those above."""
    tables = (
        dist.Backend.backend_list,
        dist.Backend._plugins,
        dist.Backend.backend_capability,
        dist.Backend.backend_type_map,
        dist.Backend.default_device_backend_map,
        getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()),
    )
    before: list[Any] = [table.copy() for table in tables]
    dist.Backend.register_backend(
        "in_python",
        lambda options, _: _GroupInPython(options.group_rank, options.group_size),
        extended_api=True,
        devices=["cpu"],
    )
    yield "in_python"
    del dist.Backend.IN_PYTHON
    for table, content in zip(tables, before, strict=True):
        table.clear()
        getattr(table, "extend" if isinstance(table, list) else "update")(content)


@pytest.mark.private(
    "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS",
    need="a group that is written in Python (the simulated cluster of benchmarks): torch 2.15 "
    "attaches its flight recorder to a group's backends in C++, and this group has none",
    instead="TORCH_FR_BUFFER_SIZE=0 in the environment while the group is made",
)
def test_a_group_in_python_is_not_recorded(backend_in_python: str) -> None:
    names = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    names.add(backend_in_python)
    dist.init_process_group(backend_in_python, store=dist.HashStore(), rank=0, world_size=2)
    try:
        assert isinstance(dist.group.WORLD, _GroupInPython)
    finally:
        dist.destroy_process_group()


@pytest.mark.private(
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
    "torch.distributed._shard.metadata.ShardMetadata",
    "ShardedTensor._process_group",
    need="values of a SHARDED_STATE_DICT of FSDP1, and what load_sharded_optimizer_state_dict "
    "reads: they are gathered over their own group when they are loaded",
    instead="conversion.py without ShardedTensor; such checkpoints load through "
    "torch.distributed.checkpoint alone",
)
def test_a_sharded_tensor_says_who_holds_what(group: dist.ProcessGroup) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    rows = torch.arange(6.0).view(3, 2)
    parts = [
        sharded_tensor.Shard.from_tensor_and_offsets(rows[begin:end], [begin, 0], 0)
        for begin, end in ((0, 2), (2, 3))
    ]
    made = sharded_tensor.init_from_local_shards(parts, 3, 2)
    assert isinstance(made, ShardedTensor)
    assert made._process_group is group
    assert (made.size(), made.dtype, made.device.type) == ((3, 2), torch.float32, "cpu")
    held: list[ShardMetadata] = made.metadata().shards_metadata
    assert [(one.shard_offsets, one.shard_sizes) for one in held] == [
        ([0, 0], [2, 2]),
        ([2, 0], [1, 2]),
    ]
    assert [one.placement.rank() for one in held] == [0, 0]
    assert [one.metadata.shard_offsets for one in made.local_shards()] == [[0, 0], [2, 0]]
    assert torch.equal(made.local_shards()[0].tensor, rows[:2])


# -- DTensors ---------------------------------------------------------------------------------


@pytest.mark.private(
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "._local_tensor",
    need="a parameter that is a DTensor over a view of the shard, whose memory is another one "
    "after a conversion, without a check of what other ranks have",
    instead="DTensor.from_local(), a new parameter at each conversion",
)
def test_a_dtensor_is_a_local_tensor_and_a_description(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh = DeviceMesh.from_group(group, "cpu")
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([1, 2]), (2, 1), torch.float32))
    local, moved = torch.ones(1, 2), torch.full((1, 2), 3.0)
    made: Any = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    param: Any = nn.Parameter(made)
    assert isinstance(param, DTensor)
    assert param.to_local().data_ptr() == local.data_ptr()
    param._local_tensor = moved
    assert torch.equal((param * 2).full_tensor(), torch.full((1, 2), 6.0))


@pytest.mark.private(
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
    need="steps of several peers' optimizers in one process (benchmarks/host_overhead.py): torch's "
    "cache has the specs of the first one, with which the others' are compared field by field",
    instead="a process for each peer, whose ratios would drift with the machine",
)
def test_what_is_known_of_operators_is_forgotten(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, debug

    value = DTensor.from_local(torch.ones(2), DeviceMesh.from_group(group, "cpu"), (Shard(0),))

    def misses() -> int:
        """Lookups that failed, of an addition."""
        before = debug._get_fast_path_sharding_prop_cache_stats()[1]
        _ = value + value
        return debug._get_fast_path_sharding_prop_cache_stats()[1] - before

    misses()
    assert misses() == 0
    debug._clear_sharding_prop_cache()
    assert misses() == 1


@pytest.mark.private(
    "torch.distributed.device_mesh.DeviceMesh._concatenate",
    "._get_root_mesh",
    "torch.distributed.tensor.placement_types._StridedShard",
    need="mesh and placements of a DTensor that tensor parallelism has split too, as FSDP2 says "
    "them: slices of a mesh do not know it by a public name, and rows of rows have no public "
    "placement",
    instead="the unit's own mesh and Shard(0), as for a unit with a process group",
)
def test_two_slices_of_a_mesh_make_one(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    first, last = mesh["dp"], mesh["tp"]
    assert first._get_root_mesh() == last._get_root_mesh() == mesh
    both = DeviceMesh._concatenate([first, last])
    assert (both.mesh_dim_names, both.shape) == (("dp", "tp"), (1, 1))
    assert both.get_group("tp") is last.get_group()
    rows = _StridedShard(0, split_factor=2)
    assert (rows.dim, rows.split_factor) == (0, 2)


@pytest.mark.private(
    "Module._ddp_params_and_buffers_to_ignore",
    need="an error by name where DistributedDataParallel wraps a unit: it asks for this first, and "
    "then waits for ranks whose parameters have another size",
    instead="nothing: its own error, or a timeout",
)
@pytest.mark.usefixtures("group")
def test_ddp_asks_what_to_ignore_before_it_communicates() -> None:
    class Refusing(nn.Linear):
        @property
        def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
            raise LookupError

    with pytest.raises(LookupError):
        nn.parallel.DistributedDataParallel(Refusing(1, 1))


@pytest.mark.private(
    "torch.distributed._functional_collectives.all_reduce",
    "torch.distributed._functional_collectives.wait_tensor",
    need="the norm of gradients in a compiled train step; what others write in place is not in a "
    "trace",
    instead="operators of our own around the collectives of comm",
)
def test_collectives_in_a_trace(group: dist.ProcessGroup) -> None:
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    def summed(x: torch.Tensor) -> torch.Tensor:
        return wait_tensor(all_reduce(x, "sum", group))

    x = torch.arange(4.0)
    reduced = torch.compile(summed, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(reduced, x * group.size())


@pytest.mark.private(
    "._optimizer_step_pre_hooks",
    "._optimizer_step_post_hooks",
    need="hooks of a step are refused where they would see local tensors",
    instead="register_step_pre_hook() of the instance, replaced by one that raises",
)
def test_an_optimizer_knows_its_hooks() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert not optimizer._optimizer_step_pre_hooks
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert (
        len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1
    )
