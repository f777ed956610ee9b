"""The example of a pass: what it changes in the graph, and what comes of it."""

from __future__ import annotations

import torch
from models import nothing_cached
from pool import on_ranks
from torch import fx

from examples.custom_pass import batch_of, keep_nan_out, make_model, train
from fsdp_dynamo import FSDP


@on_ranks(2)
def test_a_pass_of_ones_own(rank: int) -> None:
    """Rank 1 has a NaN in the second step: the other rank's gradients are kept."""
    seen: list[list[str]] = []

    def note_inputs(graph: fx.Graph) -> None:
        """What goes into each reduce-scatter."""
        scatters = [n for n in graph.nodes if "reduce_scatter" in str(n.target)]
        seen.append([str(n.args[0].target) for n in scatters])

    with nothing_cached():
        model = train((keep_nan_out, note_inputs), steps=2, backend="fsdp_dynamo_aot_eager")
    assert seen == [[], ["aten.where.ScalarOther"] * 3]  # forward, backward
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, num_ranks in ((0, 2), (1, 1)):  # rank 1 adds nothing to the second step's mean
        optimizer.zero_grad()
        for r in range(num_ranks):
            (plain(batch_of(step, r)).square().mean() / 2).backward()
        optimizer.step()
    with FSDP.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
