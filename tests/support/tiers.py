"""Tiers of tests: smoke (`make check`), default (`make test`) and all (`make test-all`).

What is slow has the mark where it is defined. Here are quick tests of each folder, which cannot be
marked where they are defined without noise. `*` stands for any characters of a test's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SMOKE: dict[str, tuple[str, ...]] = {
    "fsdp_dynamo/health": (
        "health/test_agreement.py::test_two_groups_of_the_same_ranks",
        "health/test_divergence.py::test_every_rank_gets_an_error[eager-a unit left out]",
        "health/test_flight.py::test_ranks_that_part",
    ),
    "fsdp_dynamo/checkpoint": (
        "checkpoint/test_checkpoint.py::test_goes_on_as_if_nothing_had_been[blocks-2]",
    ),
    "fsdp_dynamo/comm": (
        "comm/test_collectives.py::test_means[2]",
        "comm/test_hybrid.py::test_equals_ddp[eager-ShardingStrategy.HYBRID_SHARD-pair]",
    ),
    "fsdp_dynamo/core": (
        "core/test_accumulation.py::test_scripts[eager-FULL_SHARD]",
        "core/test_clipping.py::test_norm_equals_one_process[sharded-eager]",
        "core/test_full_params.py::test_between_steps[eager]",
        "core/test_layout.py::test_layout",
    ),
    "fsdp_dynamo/dynamo": ("hooks_mode/test_hooks_mode.py::test_managed_modules_are_tagged*",),
    "fsdp_dynamo/eager": (
        "eager/test_eager.py::test_losses_and_norms_equal_ddp[2-False-ShardingStrategy.FULL_SHARD]",
        "eager/test_offload.py::test_losses[eager-kwargs0]",
    ),
    "fsdp_dynamo/estimator": ("estimator/test_estimator.py::test_one_rank_only_computes",),
    "fsdp_dynamo/graph_mode": (
        "graph_mode/test_golden.py::test_a_small_model",
        "graph_mode/test_options.py::test_refused_before_anything_runs*",
        "wrap/test_matrix.py::test_equals_ddp[FULL_SHARD-graph]",
    ),
    "fsdp_dynamo/hooks_mode": (
        "hooks_mode/test_hooks_mode.py::test_outputs_and_gradients_are_the_plain_models[_Tables-*",
        "wrap/test_matrix.py::test_equals_ddp[FULL_SHARD-hooks]",
    ),
    "fsdp_dynamo/integrations": (
        "integrations/test_architectures.py::test_equals_ddp[gpt2-eager]",
        "integrations/test_lightning.py::test_trains_as_ddp[Direct-eager]",
    ),
    "fsdp_dynamo/observe": (
        "observe/test_explain.py::test_hooks_mode",
        "observe/test_inspection.py::test_no_such_rank",
    ),
    "fsdp_dynamo/state_dict": (
        "state_dict/test_optim_state.py::test_whole_states_are_the_plain_optimizers[sgd]",
        "state_dict/test_sharded_state_dict.py::test_forms",
        "state_dict/test_state_dict.py::test_every_order_has_plain_names",
    ),
    "fsdp_dynamo/wrap": (
        "wrap/test_composable.py::test_events_are_the_wrappers[eager]",
        "wrap/test_deferred_init.py::test_equals_eager_init[True-FULL_SHARD]",
        "wrap/test_features.py::test_mixed_precision[eager]",
        "wrap/test_surface.py::test_policies_choose_as_upstreams_do",
    ),
    "graph_passes/gradients": (
        "graph_mode/test_grad_buffer.py::test_linear_with_bias_and_padding",
    ),
    "graph_passes/memory": ("graph_mode/test_memory_model.py::test_lifetimes_follow_moved_nodes",),
    "graph_passes/regions": ("graph_mode/test_regions.py::test_equal_bodies_share_a_region",),
    "graph_passes/scheduling": (
        "graph_passes/test_schedule.py::test_forward",
        "graph_passes/test_schedule.py::test_backward",
        "graph_passes/test_cutting.py::test_views_and_constants_are_copied_to_their_readers",
        "graph_mode/test_stretches.py::test_no_stretch_writes_into_what_another_reads",
    ),
    "graph_passes/text": ("health/test_agreement.py::test_fingerprint",),
    "graph_passes/views": ("graph_passes/test_passes.py::test_noop_views",),
    "benchmarks": (
        "benchmarks/test_benchmarks.py::test_bound_by_hand",
        "benchmarks/test_cluster.py::test_all_gather",
    ),
    "scripts": (
        "scripts/test_language_model_loop.py::test_goes_on_from_the_file_of_rank_0",
        "scripts/test_loops.py::test_several_forwards_and_several_losses[eager]",
    ),
    "private names": ("private_api/test_modules.py::*",),
    "docs": (
        "project/test_tiers.py::test_*",
        "project/test_layers.py::*",
        "project/test_private_api.py::test_page_is_that_of_the_code",
        "project/test_public_api.py::*",
        "project/test_tutorial.py::test_tutorial",
    ),
}
"""Quick tests, by what they go through."""


def marks_of(test: str) -> Iterable[str]:
    """Marks of a test, named as in the tables: its file below tests, and its name."""
    if any(_stands_for(entry, test) for entries in SMOKE.values() for entry in entries):
        yield "smoke"


def unused(tests: Iterable[str]) -> list[str]:
    """Entries that stand for none of the tests."""
    entries = [entry for found in SMOKE.values() for entry in found]
    named = list(tests)
    return [e for e in entries if not any(_stands_for(e, test) for test in named)]


def _stands_for(entry: str, test: str) -> bool:
    parts = [re.escape(part) for part in entry.split("*")]
    return re.fullmatch(".*".join(parts), test) is not None
