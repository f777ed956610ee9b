"""The example of a pass: what it changes in the graph, and what comes of it."""

from __future__ import annotations

import torch
from models import nothing_cached
from pool import RankPool
from torch import fx

from examples.custom_pass import batch_of, keep_nan_out, make_model, train
from fsdp_dynamo import FSDP

SEEN: list[list[str]] = []


def note_inputs(graph: fx.Graph) -> None:
    """What goes into each reduce-scatter."""
    scatters = [n for n in graph.nodes if "reduce_scatter" in str(n.target)]
    SEEN.append([str(n.args[0].target) for n in scatters])


def _train(rank: int, world_size: int) -> tuple[bool, bool, list[list[str]]]:
    """With the pass and without it: whether all is finite; and the first one's graphs."""
    SEEN.clear()
    finite = []
    with nothing_cached():
        for passes in ((keep_nan_out, note_inputs), ()):
            model = train(passes, backend="fsdp_dynamo_aot_eager")
            finite.append(all(bool(p.isfinite().all()) for p in model.parameters()))
            torch._dynamo.reset()
    return finite[0], finite[1], SEEN


def test_a_pass_of_ones_own(ranks: RankPool) -> None:
    for with_it, without, graphs in ranks.run(_train, 2):
        assert with_it
        assert not without
        assert graphs == [[], ["aten.where.ScalarOther"] * 3]  # forward, backward


def _one_step(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters after the step in which rank 1 has a NaN, and those of one process."""
    model = train((keep_nan_out,), steps=2)  # by Inductor
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, num_ranks in ((0, 2), (1, 1)):  # rank 1 adds nothing to the second step's mean
        optimizer.zero_grad()
        for r in range(num_ranks):
            (plain(batch_of(step, r)).square().mean() / 2).backward()
        optimizer.step()
    with FSDP.summon_full_params(model):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return [(ours.detach().clone(), theirs.detach()) for ours, theirs in pairs]


def test_the_other_ranks_gradients_are_kept(ranks: RankPool) -> None:
    for pairs in ranks.run(_one_step, 2):
        assert len(pairs) == 6
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)
