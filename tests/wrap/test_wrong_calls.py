"""Functions and methods that are called with something wrong, or on the wrong object."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from unittest import mock

import pytest
import torch
from models import Block, batch, loss_of, make_transformer, nothing_cached, wrap
from pool import on_ranks
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


@on_ranks(1)
def test_what_concerns_the_whole_model(rank: int) -> None:
    block = wrap(make_transformer(num_blocks=1)).module.blocks[0]
    with pytest.raises(FSDPStateError, match=r"unit 'blocks\.0': expected the outermost unit"):
        block.no_sync().__enter__()
    with pytest.raises(FSDPStateError, match=r"clip_grad_norm_\(\), got a nested unit"):
        block.clip_grad_norm_(1.0)


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


@on_ranks(1)
def test_a_class_is_no_policy(rank: int) -> None:
    with pytest.raises(FSDPTypeError, match=r"'auto_wrap_policy'.*ModuleWrapPolicy\({Block}\)"):
        FSDP(make_transformer(num_blocks=1), auto_wrap_policy=Block)
