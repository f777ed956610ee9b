"""Wrong arguments and accidents: a clear error, nothing changed, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import io
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from models import Block, Transformer, batch, loss_of, make_transformer, nothing_cached, train, wrap
from modes import in_mode
from pool import on_ranks
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import fsdp_dynamo
from fsdp_dynamo import (
    FSDP,
    CheckpointError,
    CPUOffload,
    FSDPError,
    ShardingStrategy,
    checkpoint,
    fully_shard,
)
from fsdp_dynamo.core.original_parameter import OriginalParameter
from fsdp_dynamo.wrap import build, deferred_init
from fsdp_dynamo.wrap.arguments import warn_of_cpu_start
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy
from graph_passes.pipeline import Pipeline


def _without_values() -> nn.Module:
    """A model whose class has no ``reset_parameters`` for the one parameter on the meta device."""
    model = make_transformer(num_blocks=1)
    model.scale = nn.Parameter(torch.empty(1, device="meta"))
    return model


def _two_devices() -> None:
    """What ``FSDP`` checks of parameters, without a second device at hand."""
    on = [types.SimpleNamespace(device=torch.device(d), is_meta=False) for d in ("cpu", "cuda:0")]
    originals = [OriginalParameter(p, f"{p.device.type}.weight") for p in on]  # type: ignore[arg-type]
    build._check_devices("block", originals)


def _cpu_tensors_with_nccl() -> None:
    """A group of ranks that, as an NCCL group, serves no CPU."""
    with mock.patch.object(deferred_init, "serves_cpu", return_value=False):
        FSDP(nn.Linear(2, 2), sync_module_states=True)


def _wrap_in_compiled_mode(backend: str, fullgraph: bool, **kwargs: Any) -> None:
    model = wrap(make_transformer(num_blocks=1), **kwargs)
    torch.compile(model, backend=backend, fullgraph=fullgraph)(batch(0, 0))


def _with_two_parts() -> nn.Module:
    model = nn.Linear(2, 2)
    parts = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))  # type: ignore[no-untyped-call]
    model.weight = nn.Parameter(parts, requires_grad=False)
    return model


def _tied_to_a_nested_unit(shard: Callable[[nn.Module], nn.Module]) -> None:
    model = make_transformer(num_blocks=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[0] = shard(model.blocks[0])
    shard(model)


def _wrap_in_inference_mode() -> None:
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        fully_shard(module)


def _compile_with_mode(backend: str, mode: str) -> None:
    model = torch.compile(nn.Linear(2, 2), backend=backend, mode=mode)
    try:
        model(torch.ones(2))
    except BackendCompilerFailed as error:
        raise error.inner_exception from None


HYBRID = ShardingStrategy.HYBRID_SHARD
ARGUMENTS: list[tuple[str, Any, str]] = [
    ("auto_wrap_policy", ModuleWrapPolicy({Block}), "got a policy that matches nothing"),
    ("auto_wrap_policy", CustomPolicy(lambda _: 3), "expected True, False or a dict"),
    ("auto_wrap_policy", CustomPolicy(lambda _: {"device_id": 1}), "one of sharding_strategy"),
    (
        "auto_wrap_policy",
        CustomPolicy(lambda _: {"sharding_strategy": HYBRID}),
        "expected a strategy that goes with the root's FULL_SHARD",
    ),
    ("sharding_strategy", "FULL", "Pass one of FULL_SHARD"),
    ("sharding_strategy", HYBRID, "expected a known number of ranks per node"),
    ("device_id", CPUOffload(), "expected a number, a torch.device or its name"),
    ("ignored_modules", ["weight"], "argument 'ignored_modules' or 'ignored_states'"),
]
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "wrapped twice": (lambda: FSDP(FSDP(nn.Linear(2, 2))), "expected a module that is no unit yet"),
    "a class as policy": (
        lambda: FSDP(nn.Linear(2, 2), auto_wrap_policy=Block),
        "FSDPTypeError: argument 'auto_wrap_policy': ",
    ),
    "a tensor subclass": (
        lambda: FSDP(_with_two_parts()),
        "FSDPValueError: parameter 'weight': expected a plain tensor",
    ),
    "no mesh": (
        lambda: fully_shard(nn.Linear(2, 2), mesh=object()),  # type: ignore[arg-type]
        "argument 'mesh': expected a DeviceMesh, got <object",
    ),
    "two devices": (_two_devices, "'block.cuda.weight' on cuda:0"),
    "CPU tensors with NCCL": (
        _cpu_tensors_with_nccl,
        "got a CPU tensor with an NCCL group. Pass device_id=",
    ),
    "meta": (lambda: FSDP(_without_values()), "reset_parameters() method, got none for 'scale'"),
    "hybrid pair": (
        lambda: FSDP(
            nn.Linear(2, 2),
            process_group=(dist.group.WORLD, dist.group.WORLD),
            sharding_strategy=HYBRID,
        ),
        "that share this rank only",
    ),
    "pair of groups": (
        lambda: FSDP(nn.Linear(2, 2), process_group=(dist.group.WORLD, dist.group.WORLD)),
        "a tuple of groups, which is for HYBRID_SHARD",
    ),
    "reduction group": (
        lambda: FSDP(
            nn.Linear(2, 2),
            reduction_group=dist.new_group([dist.get_rank()], use_local_synchronization=True),
        ),
        "expected a group of the shard group's ranks, [0, 1], in that order",
    ),
    "param_init_fn": (
        lambda: FSDP(nn.Linear(2, 2, device="meta"), param_init_fn=lambda m: None),
        "to be initialised, got no values for 'weight', 'bias'",
    ),
    "ignored unit": (
        lambda: FSDP(nn.Linear(2, 2), ignored_modules=[FSDP(nn.Linear(2, 2))]),
        "expected modules that are no units",
    ),
    "tied to a nested unit": (
        lambda: _tied_to_a_nested_unit(fully_shard),
        "parameter 'blocks.1.up.weight': expected a parameter that no unit holds yet",
    ),
    "use_orig_params, hooks mode": (
        lambda: _wrap_in_compiled_mode("aot_eager", False, use_orig_params=False),
        "expected use_orig_params=True under torch.compile",
    ),
    "use_orig_params, graph mode": (
        lambda: _wrap_in_compiled_mode("fsdp_dynamo_aot_eager", True, use_orig_params=False),
        "expected use_orig_params=True under torch.compile",
    ),
    "fullgraph with another backend": (
        lambda: _wrap_in_compiled_mode("aot_eager", True),
        'expected backend="fsdp_dynamo"',
    ),
    "max_norm": (
        lambda: FSDP(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))),
        "UnsupportedError: parameter '0.weight': expected an embedding with max_norm=None",
    ),
    "sparse gradients": (
        lambda: fully_shard(nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True))),
        "UnsupportedError: parameter '0.weight': expected an embedding with sparse=False",
    ),
    "inference mode, wrapper": (
        torch.inference_mode(lambda: FSDP(nn.Linear(2, 2))),
        "FSDPStateError: parameter 'weight': expected a module that is made and wrapped outside",
    ),
    "inference mode, composable": (
        _wrap_in_inference_mode,
        "FSDPStateError: a Linear: expected a module that is made and wrapped outside",
    ),
    "Join": (
        lambda: Join([FSDP(nn.Linear(2, 2))]),
        "UnsupportedError: the root unit: expected as many batches on all ranks",
    ),
    "no such parameter": (
        lambda: FSDP(nn.Linear(2, 2)).flat_parameter_of("nothing"),
        "expected the FQN of a parameter",
    ),
    "a mode with CUDA graphs": (
        lambda: _compile_with_mode("fsdp_dynamo", "reduce-overhead"),
        "expected 'default' or 'max-autotune-no-cudagraphs', got 'reduce-overhead'. Leave mode "
        "out: CUDA graphs come with options={'cuda_graphs': True}.",
    ),
    "a mode for nothing": (
        lambda: _compile_with_mode("fsdp_dynamo_aot_eager", "max-autotune-no-cudagraphs"),
        'nothing is compiled by Inductor; take backend="fsdp_dynamo"',
    ),
}


@on_ranks(2)
def test_wrong_arguments(rank: int) -> None:
    def wrap_with(argument: str, value: Any) -> None:
        FSDP(nn.Sequential(nn.Linear(2, 2)), **{argument: value})

    cases = dict(CASES)
    for argument, value, words in ARGUMENTS:
        cases[f"{argument}={value}"] = partial(wrap_with, argument, value), words
    for name, (action, words) in cases.items():
        with pytest.raises(FSDPError) as error:
            action()
        assert words in f"{type(error.value).__name__}: {error.value}", name


# -- kinds of errors, beside FSDP1: ``except`` clauses go on working -------------------------------

Library = Any
INPUT = torch.ones(2, 4)


def _wrap(library: Library, module: nn.Module, **arguments: Any) -> Any:
    cpu = torch.device("cpu")
    return library.FullyShardedDataParallel(
        module, device_id=cpu, use_orig_params=True, **arguments
    )


def _layers(library: Library) -> Any:
    """Its policy of one unit a layer."""
    policies = upstream.wrap if library is upstream else fsdp_dynamo.wrap_policy
    return policies.ModuleWrapPolicy({nn.Linear})


class _During(nn.Linear):
    """Opens a context in its forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.opens: Callable[[], Any] = contextlib.nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.opens():
            return super().forward(x)


def _in_forward(library: Library, opens: Callable[[Any], Any]) -> None:
    inner = _During()
    model = _wrap(library, nn.Sequential(inner))
    inner.opens = lambda: opens(model)
    model(INPUT)


def _nested(library: Library, call: Callable[[Any], Any]) -> None:
    model = _wrap(library, nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy=_layers(library))
    model(INPUT).sum().backward()
    call(model[0])


def _hook(*_: Any) -> None:
    """A communication hook."""


def _hook_twice(library: Library) -> None:
    model = _wrap(library, nn.Linear(4, 4))
    model.register_comm_hook(None, _hook)
    model.register_comm_hook(None, _hook)


def _over_wrapped(library: Library) -> None:
    model = nn.Sequential(nn.Linear(4, 4), _wrap(library, nn.Linear(4, 4)))
    _wrap(library, model, auto_wrap_policy=_layers(library))


def _hybrid(library: Library, **arguments: Any) -> None:
    strategy = library.ShardingStrategy.HYBRID_SHARD
    _wrap(library, nn.Linear(4, 4), sharding_strategy=strategy, **arguments)


OF_BOTH: dict[str, Callable[[Library], object]] = {
    "no_sync in a forward": lambda one: _in_forward(one, lambda m: m.no_sync()),
    "summon in a forward": lambda one: _in_forward(one, lambda m: m.summon_full_params(m)),
    "no_sync of a nested unit": lambda one: _nested(one, lambda m: m.no_sync().__enter__()),
    "clipping by a nested unit": lambda one: _nested(one, lambda m: m.clip_grad_norm_(1.0)),
    "hook of a nested unit": lambda one: _nested(one, lambda m: m.register_comm_hook(None, _hook)),
    "second hook": _hook_twice,
    "policy over wrapped": _over_wrapped,
    "group and mesh": lambda one: _wrap(
        one,
        nn.Linear(4, 4),
        process_group=dist.group.WORLD,
        device_mesh=init_device_mesh("cpu", (2,)),
    ),
    "hybrid, one group": lambda one: _hybrid(one, process_group=dist.group.WORLD),
    "hybrid, 1-D mesh": lambda one: _hybrid(one, device_mesh=init_device_mesh("cpu", (2,))),
    "no policy": lambda one: _wrap(one, nn.Linear(4, 4), auto_wrap_policy=3),
}


def _error(case: Callable[[Library], object], library: Library) -> Exception | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # upstream prints before it raises
            case(library)
    except Exception as error:  # noqa: BLE001  # which, is the question
        return error.with_traceback(None)
    return None


@on_ranks(2)
def test_errors_are_of_upstreams_kinds(rank: int) -> None:
    """What FSDP1 raises on CPU, or a subclass."""
    for name, case in OF_BOTH.items():
        theirs, ours = (_error(case, library) for library in (upstream, fsdp_dynamo))
        assert theirs is not None, name
        assert isinstance(ours, FSDPError), name
        assert isinstance(ours, type(theirs)), name


# -- accidents -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_refused_wrap_changes_nothing(rank: int) -> None:
    model = _without_values()
    modules = list(model.modules())
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(FSDPError, match="meta"):
        wrap(model)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert [p.shape for p in model.parameters()] == shapes


def test_cpu_start_warns() -> None:
    class AcceleratorGroup:
        _device_types = (torch.device("cuda"),)

    group: Any = AcceleratorGroup()
    with pytest.warns(UserWarning, match="pass device_id, or move the module"):
        warn_of_cpu_start(nn.Linear(2, 2), group, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_cpu_start(nn.Linear(2, 2), group, 0)


@on_ranks(2)
def test_ignoring_the_root_warns(rank: int) -> None:
    plain = make_transformer(num_blocks=1)
    with pytest.warns(UserWarning, match="nothing will be sharded"):
        wrapped = FSDP(plain, ignored_modules=[plain])
    assert not any(isinstance(p, DTensor) for p in wrapped.parameters())


@pytest.mark.parametrize(("kind", "mode"), [("dtype", "eager"), ("shape", "graph")])
@on_ranks(2)
def test_goes_on_after_a_refused_forward(rank: int, kind: str, mode: str) -> None:
    expected, _ = train(wrap(make_transformer(num_blocks=1)), rank, steps=2)
    wrapped = wrap(make_transformer(num_blocks=1))
    model = in_mode(wrapped, mode)
    loss_of(model, batch(rank, 0)).backward()
    layer = wrapped.blocks[0].up
    weight = layer.weight
    given = {"shape": torch.zeros(16, 32), "dtype": torch.zeros(32, 16, dtype=torch.float64)}
    layer.weight = nn.Parameter(given[kind])
    words = "parameter 'blocks.0.up.weight': expected the wrapped parameter"
    with pytest.raises(FSDPError, match=words):
        model(batch(rank, 0))
    layer.weight = weight
    assert train(model, rank, steps=2)[0] == pytest.approx(expected, rel=1e-6)


class Failing(Transformer):
    """Raises in the middle of its forward when asked to."""

    fail_at = -1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.fail_at:
                raise ValueError("as asked")
        return self.head(self.norm(x)) * self.scale


@pytest.mark.parametrize("mode", ["eager", "hooks"])
@on_ranks(2)
def test_forward_that_raises(rank: int, mode: str) -> None:
    torch.manual_seed(7)
    plain = Failing(num_blocks=2)
    expected, _ = train(wrap(copy.deepcopy(plain)), rank, steps=2)
    wrapped = wrap(plain)
    model = in_mode(wrapped, mode)
    plain.fail_at = 0
    with pytest.raises(Exception, match="as asked"):
        model(batch(rank, 0))
    assert not any(flat.is_allocated for unit in wrapped._fsdp_root.units for flat in unit.flats)
    plain.fail_at = -1
    assert train(model, rank, steps=2)[0] == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_calls_in_a_wrong_state(rank: int) -> None:
    model = wrap(make_transformer(num_blocks=1))
    for call, words in (
        (lambda output: output.sum().backward(), "Do not call backward.* inside the forward"),
        (lambda output: model.state_dict(), "expected state_dict.* between two steps"),
    ):
        handle = model.module.head.register_forward_hook(lambda m, a, out, call=call: call(out))
        with pytest.raises(FSDPError, match=words):
            model(batch(rank, 0))
        handle.remove()
    train(model, rank, steps=1)


@on_ranks(2)
def test_what_is_no_folder_of_checkpoints(rank: int, tmp_path: Path) -> None:
    model = wrap(make_transformer(num_blocks=1))
    if rank == 0:
        (tmp_path / "file").touch()
    saved = checkpoint.save(tmp_path / "run", model, step=3)
    with pytest.raises(CheckpointError, match="expected the folder of all checkpoints") as error:
        checkpoint.load(saved, model)
    assert f"Pass '{tmp_path / 'run'}', and step=3" in str(error.value)
    with pytest.raises(CheckpointError, match="got a file"):
        checkpoint.load(tmp_path / "file", model)


def _looks(graph: fx.Graph) -> None:
    """Changes nothing."""


def test_a_pass_without_a_file() -> None:
    """Nobody can tell whether it has been edited: no graph that was cached fits."""
    typed = FunctionType(_looks.__code__, {"__name__": "typed"}, "typed")
    typed.__module__ = "typed"
    assert Pipeline([_looks]).cache_key() == Pipeline([_looks]).cache_key()
    assert Pipeline([typed]).cache_key() != Pipeline([typed]).cache_key()


@pytest.mark.slow
@on_ranks(2)
def test_the_mode_reaches_inductor(rank: int) -> None:
    seen: list[bool] = []
    plain = loss_of(wrap(make_transformer(num_blocks=1)), batch(rank, 0))
    step = torch.compile(
        wrap(make_transformer(num_blocks=1)),
        fullgraph=True,
        backend="fsdp_dynamo",
        mode="max-autotune-no-cudagraphs",
    )
    observe = Pipeline.run

    def run(pipeline: Pipeline, graph: fx.Graph) -> None:
        seen.append(torch._inductor.config.max_autotune)
        observe(pipeline, graph)

    with mock.patch.object(Pipeline, "run", run), nothing_cached():
        loss = loss_of(step, batch(rank, 0))
        loss.backward()
    torch.testing.assert_close(loss, plain)
    assert seen == [True, True]
