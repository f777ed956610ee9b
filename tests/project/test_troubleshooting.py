"""The eleven most common mistakes: each error leads to its paragraph in docs/troubleshooting.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from models import Block, Branching, batch, loss_of, make_transformer, wrap
from pool import on_ranks
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy

from fsdp_dynamo import FSDP, FSDPError, fully_shard
from fsdp_dynamo import __main__ as commands
from fsdp_dynamo.errors import TROUBLESHOOTING, Mistake
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

PAGE = Path(__file__).parents[2] / TROUBLESHOOTING
GRAPH = {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True}
MISTAKES: tuple[Mistake, ...] = get_args(Mistake)


def _message(action: Callable[[], object]) -> str:
    try:
        action()
    except FSDPError as error:
        return f"{type(error).__name__}: {error}"
    except BackendCompilerFailed as error:  # Dynamo's, around what a backend raises
        return str(error).partition("\n")[2]
    return "no error"


# -- the mistakes ----------------------------------------------------------------------------------


def _step(model: nn.Module, **compiled: Any) -> None:
    run = torch.compile(model, **compiled) if compiled else model
    loss_of(run, batch(dist.get_rank(), 0)).backward()


def _wrapped_twice() -> None:
    model = FSDP(make_transformer(num_blocks=1), auto_wrap_policy=ModuleWrapPolicy({Block}))
    model.blocks[0] = FSDP(model.blocks[0])


def _no_values() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    with torch.device("meta"):
        model = Scaled()
    FSDP(model)


def _nobody_wrote_them() -> None:
    FSDP(nn.Linear(4, 4, device="meta"), param_init_fn=lambda module: None)


def _tied() -> None:
    model = make_transformer(num_blocks=1, tied=True)
    model.embed = FSDP(model.embed)
    FSDP(model)


def _removed_after_wrapping() -> None:
    model = wrap(make_transformer(num_blocks=1))
    del model.module.embed.weight
    _step(model)


def _inside_summon() -> None:
    model = wrap(make_transformer(num_blocks=1))
    with FSDP.summon_full_params(model):
        model(batch(0, 0))


def _another_backend() -> None:
    _step(wrap(make_transformer(num_blocks=1)), backend="aot_eager", fullgraph=True)


def _without_originals() -> None:
    model = FSDP(make_transformer(num_blocks=1), use_orig_params=False)
    _step(model, backend="aot_eager")


def _skipping(on_ranks: tuple[int, ...]) -> tuple[Branching, nn.Module]:
    """The model, and as units: on some ranks it leaves its last block out."""
    torch.manual_seed(7)
    plain = Branching(num_blocks=2)
    plain.skipped = frozenset({1} if dist.get_rank() in on_ranks else ())
    return plain, wrap(plain)


def _graph_of_one_rank() -> None:
    """The first rank runs a new graph, of other units, while the other runs the old one."""
    plain, model = _skipping(on_ranks=())
    _step(model, **GRAPH)
    if dist.get_rank() == 0:
        plain.skipped = frozenset({1})
    _step(model, **GRAPH)


TOGETHER: dict[str, tuple[Mistake, Callable[[], object]]] = {
    "wrapped twice": ("wrapped-twice", _wrapped_twice),
    "policy": (
        "a-policy-that-matches-nothing",
        lambda: FSDP(nn.Linear(2, 2), auto_wrap_policy=ModuleWrapPolicy({Block})),
    ),
    "no values": ("no-values-on-the-meta-device", _no_values),
    "nobody wrote them": ("no-values-on-the-meta-device", _nobody_wrote_them),
    "tied": ("tied-to-a-unit-wrapped-before", _tied),
    "removed": ("a-parameter-changed-after-wrapping", _removed_after_wrapping),
    "summon": ("a-forward-inside-summon_full_params", _inside_summon),
    "backend": ("another-backend-with-fullgraph", _another_backend),
    "use_orig_params": ("compiled-without-original-parameters", _without_originals),
}
"""Those after which ranks can go on, in one job."""

APART: dict[str, tuple[Mistake, Callable[[], None]]] = {
    "another graph": ("another-graph-on-one-rank", lambda: _step(_skipping((1,))[1], **GRAPH)),
    "graph of one rank": ("another-graph-on-one-rank", _graph_of_one_rank),
    "other units": ("other-units-on-one-rank", lambda: _step(_skipping((1,))[1])),
}
"""Those that end a run."""


# -- what nobody says ------------------------------------------------------------------------------


def _small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def _gradients_of(model: nn.Module, size: int = 32, of_all: int = 0) -> None:
    """``of_all``: examples of all ranks, by which the loss of this rank is weighed."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(size, 8, generator=generator)
    y = torch.randint(4, (size,), generator=generator)
    loss = cross_entropy(model(x), y, reduction="sum" if of_all else "mean")
    (loss * dist.get_world_size() / of_all if of_all else loss).backward()


def _norm_of_gradients(parameters: Iterable[nn.Parameter]) -> float:
    norms = [p.grad.norm().item() for p in parameters if p.grad is not None]
    total: float = torch.tensor(norms).norm().item()
    return total


@on_ranks(2)
def test_what_is_wrong_without_a_message(rank: int) -> None:
    """Each row of that section."""
    plain = [_small(seed).state_dict() for seed in range(2)]
    for sync, expected in ((False, [False, False]), (True, [True, False])):
        state = FSDP(_small(rank), sync_module_states=sync).state_dict()
        same = [all(map(torch.equal, p.values(), state.values())) for p in plain]
        assert same == expected  # without: of neither rank

    model = FSDP(_small())
    _gradients_of(model)
    here, whole_norm = _norm_of_gradients(model.parameters()), model.clip_grad_norm_(1e9).item()
    assert here < whole_norm
    squares = torch.tensor(here**2)
    dist.all_reduce(squares)
    assert squares.item() == pytest.approx(whole_norm**2, rel=1e-5)
    weight: Any = model.get_parameter("0.weight")
    before = weight.to_local().clone()
    weight.data = torch.zeros_like(weight)
    assert torch.equal(weight.to_local(), before)
    statistics: list[Any] = [None, None]
    dist.all_gather_object(statistics, model.state_dict()["1.running_mean"][0].item())
    assert statistics[0] != statistics[1]

    model = FSDP(_small())
    loss = model(torch.randn(4, 8)).sum()
    assert set(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)) == {None}

    for of_all in (0, 36):  # 32 examples here, 4 there, without statistics of a batch
        model = FSDP(nn.Linear(8, 4), sync_module_states=True)
        _gradients_of(model, size=[32, 4][rank], of_all=of_all)
        whole = nn.Linear(8, 4)
        whole.load_state_dict(model.state_dict())
        generators = [torch.Generator().manual_seed(r) for r in range(2)]
        sizes = list(zip((32, 4), generators, strict=True))
        x = torch.cat([torch.randn(size, 8, generator=g) for size, g in sizes])
        y = torch.cat([torch.randint(4, (size,), generator=g) for size, g in sizes])
        cross_entropy(whole(x), y).backward()
        seen, right = model.clip_grad_norm_(1e9).item(), _norm_of_gradients(whole.parameters())
        if of_all:
            assert seen == pytest.approx(right, rel=1e-5)
        else:
            assert abs(seen - right) > 1e-3


class _KeepsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _small(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = get_gradient_edge(self.head.weight)
        y: torch.Tensor = self.head(self.body(x))
        return y


@on_ranks(2)
def test_gradients_of_one_layer(rank: int) -> None:
    """As the row with torch's message says."""

    def gradients(wrap_it: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = _KeepsLast()
        wrapped = wrap_it(model)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(rank))
        y = wrapped(x)
        losses = y.square().mean(), y.abs().mean()
        found = [torch.autograd.grad(one, [model.last], retain_graph=True)[0] for one in losses]
        sum(losses).backward()
        return found

    model = fully_shard(_KeepsLast())
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(model(torch.ones(8, 8)).sum(), model.head.weight)
    words = str(error.value).partition(". ")[0]
    assert f"`{words}`" in PAGE.read_text()
    for got, wanted in zip(gradients(FSDP), gradients(lambda model: model), strict=True):
        torch.testing.assert_close(got, wanted)


# -- the page --------------------------------------------------------------------------------------


def _link_of(heading: str) -> str:
    """As forges and MkDocs make links of headings."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _sections() -> dict[str, str]:
    """The page's texts by the links of their headings."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)
    return {_link_of(heading): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def _check(message: str, mistake: Mistake) -> None:
    """It ends with the link, and its paragraph shows it; "..." there stands for anything."""
    link = f" See {TROUBLESHOOTING}#{mistake} (python -m fsdp_dynamo troubleshoot {mistake})."
    own = message.partition("\n")[0]  # Dynamo adds where in the user's code
    assert own.endswith(link), message
    said = own.removesuffix(link)
    shown = re.findall(r"```text\n(.*?)\n```", _sections()[mistake], flags=re.DOTALL)
    patterns = [re.escape(" ".join(text.split())).replace(r"\.\.\.", ".*") for text in shown]
    assert any(re.fullmatch(pattern, said) for pattern in patterns), (said, shown)


def test_every_mistake_has_its_paragraph_and_a_test() -> None:
    assert list(_sections())[: len(MISTAKES)] == list(MISTAKES)
    tested = {mistake for mistake, _ in [*TOGETHER.values(), *APART.values()]}
    assert tested | {"no-process-group"} == set(MISTAKES)
    assert len(MISTAKES) == 11


def test_help_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(commands.sections()) == list(_sections())
    for mistake in MISTAKES:
        assert commands.run(["troubleshoot", mistake]) == 0
        heading, _, text = capsys.readouterr().out.partition("\n")
        assert _link_of(heading.removeprefix("## ")) == mistake
        assert text.strip() == _sections()[mistake].strip()
    assert commands.run(["troubleshoot", "wrapped"]) == 2
    assert "expected one of these, got 'wrapped'" in capsys.readouterr().err
    for arguments, code in (([], 0), (["--help"], 0), (["nothing"], 2)):
        assert commands.run(arguments) == code
        said = capsys.readouterr().out
        assert all(re.search(rf"^  {name} ", said, re.MULTILINE) for name in commands.COMMANDS)
    for name in commands.COMMANDS:
        with pytest.raises(SystemExit) as end:
            commands.run([name, "--help"])
        assert end.value.code == 0
        assert f"python -m fsdp_dynamo {name}" in capsys.readouterr().out


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    _check(_message(lambda: FSDP(nn.Linear(2, 2))), "no-process-group")


@on_ranks(2)
def test_errors_lead_to_their_paragraphs(rank: int) -> None:
    for mistake, action in TOGETHER.values():
        _check(_message(action), mistake)
        torch._dynamo.reset()


@pytest.mark.parametrize("name", APART)
@on_ranks(2)
def test_errors_of_ranks_that_part(rank: int, name: str) -> None:
    mistake, action = APART[name]
    _check(_message(action), mistake)
