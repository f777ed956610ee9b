"""Functions and methods that are called with something wrong, or on the wrong object."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from unittest import mock

import pytest
import torch
from models import Block, batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed

import fsdp_dynamo
from fsdp_dynamo import (
    FSDP,
    CheckpointError,
    FSDPStateError,
    FSDPTypeError,
    FSDPValueError,
    checkpoint,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.pipeline import Pipeline


def _compile_with_mode(backend: str, mode: str) -> None:
    model = torch.compile(nn.Linear(2, 2), backend=backend, mode=mode)
    try:
        model(torch.ones(2))
    except BackendCompilerFailed as error:
        raise error.inner_exception from None


_WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a class in place of a set": (
        partial(ModuleWrapPolicy, Block),  # type: ignore[arg-type]
        FSDPTypeError,
        "expected a set of classes of modules, got <class 'models.Block'>",
    ),
    "recompiles below 0": (
        partial(fsdp_dynamo.warmup, nn.Linear(1, 1), [], max_recompiles=-1),
        FSDPValueError,
        "0 or more, or None, got -1",
    ),
    "recompiles in words": (
        partial(fsdp_dynamo.limit_recompiles, "two"),  # type: ignore[arg-type]
        FSDPValueError,
        "got 'two'",
    ),
    "a mode with CUDA graphs": (
        partial(_compile_with_mode, "fsdp_dynamo", "reduce-overhead"),
        FSDPValueError,
        "expected 'default' or 'max-autotune-no-cudagraphs', got 'reduce-overhead'. Leave mode "
        "out: graph mode supports no mode with CUDA graphs.",
    ),
    "a mode for nothing": (
        partial(_compile_with_mode, "fsdp_dynamo_aot_eager", "max-autotune-no-cudagraphs"),
        FSDPValueError,
        'nothing is compiled by Inductor; take backend="fsdp_dynamo"',
    ),
    "seconds in words": (
        partial(fsdp_dynamo.set_agreement_timeout, "10"),  # type: ignore[arg-type]
        FSDPValueError,
        "expected a number of seconds above 0, got '10'",
    ),
}


@pytest.mark.parametrize("name", list(_WRONG))
def test_wrong_arguments_of_functions(name: str) -> None:
    call, kind, text = _WRONG[name]
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)


def _on_a_nested_unit(rank: int, world_size: int) -> list[str]:
    block = wrap(make_transformer(num_blocks=1)).module.blocks[0]
    messages = []
    for call in (block.no_sync().__enter__, lambda: block.clip_grad_norm_(1.0)):
        with pytest.raises(FSDPStateError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_what_concerns_the_whole_model(ranks: RankPool) -> None:
    no_sync, clip = ranks.run(_on_a_nested_unit, 1)[0]
    assert "unit 'blocks.0': expected the outermost unit of the model for no_sync()" in no_sync
    assert "clip_grad_norm_(), got a nested unit. Call it on the whole model." in clip


def _looks(graph: fx.Graph) -> None:
    """Changes nothing."""


def test_a_pass_without_a_file() -> None:
    """Nobody can tell whether it has been edited: no graph that was cached fits."""
    typed = FunctionType(_looks.__code__, {"__name__": "typed"}, "typed")
    typed.__module__ = "typed"
    assert Pipeline([_looks]).cache_key() == Pipeline([_looks]).cache_key()
    assert Pipeline([typed]).cache_key() != Pipeline([typed]).cache_key()


def _tuned(rank: int, world_size: int) -> tuple[bool, list[bool]]:
    seen: list[bool] = []
    plain = loss_of(wrap(make_transformer(num_blocks=1)), batch(rank, 0))
    model = wrap(make_transformer(num_blocks=1))
    step = torch.compile(
        model, fullgraph=True, backend="fsdp_dynamo", mode="max-autotune-no-cudagraphs"
    )
    observe = Pipeline.run

    def run(pipeline: Pipeline, graph: fx.Graph) -> None:
        seen.append(torch._inductor.config.max_autotune)
        observe(pipeline, graph)

    with (
        mock.patch.object(Pipeline, "run", run),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        loss = loss_of(step, batch(rank, 0))
        loss.backward()
    return bool(torch.allclose(loss, plain, rtol=1e-5)), seen


@pytest.mark.slow
def test_the_mode_reaches_inductor(ranks: RankPool) -> None:
    for is_equal, seen in ranks.run(_tuned, 2):
        assert is_equal
        assert seen == [True, True]


def _on_a_folder(rank: int, world_size: int, folder: Path) -> list[str]:
    model = wrap(make_transformer(num_blocks=1))
    saved = checkpoint.save(folder / "run", model, step=3)
    if rank == 0:
        (folder / "file").touch()
    messages = []
    for path in (saved, folder / "file"):
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(path, model)
        messages.append(str(error.value))
    return messages


def test_what_is_no_folder_of_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    for one, file in ranks.run(_on_a_folder, 2, tmp_path):
        assert "expected the folder of all checkpoints of a run, got one of them" in one
        assert f"Pass '{tmp_path / 'run'}', and step=3" in one
        assert "got a file" in file


def test_a_class_is_no_policy(ranks: RankPool) -> None:
    for message in ranks.run(_class_as_policy, 1):
        assert "argument 'auto_wrap_policy'" in message
        assert "Pass ModuleWrapPolicy({Block})." in message


def _class_as_policy(rank: int, world_size: int) -> str:
    with pytest.raises(FSDPTypeError) as error:
        FSDP(make_transformer(num_blocks=1), auto_wrap_policy=Block)
    return str(error.value)
