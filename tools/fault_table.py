"""Faults that ``planted_faults.py`` plants: one for each mechanism of the library.

A fault is a wrong edit that a programmer could make. Fragments are whole expressions or statements;
choose them at the heart of a mechanism, where code is rewritten least. ``tests`` are the few files
that are expected to catch it: they take well below two minutes.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A wrong edit.

    Attributes:
        name: short, unique.
        effect: what goes wrong.
        function: name of the function, after those of its classes where it is not unique.
        fragment: an expression, or one or several statements, in that function only once. Where
            the function has another name by now, it is looked for in all of the library.
        replacement: in its place.
        tests: files that are expected to catch it, narrowest first.
    """

    name: str
    effect: str
    function: str
    fragment: str
    replacement: str
    tests: tuple[str, ...]


FAULTS = (
    # -- gradients -----------------------------------------------------------------------------
    Fault(
        "gradient-sum",
        "gradients are summed over ranks instead of averaged",
        "divide_first",
        "return dist.ReduceOp.AVG, size",
        "return dist.ReduceOp.AVG, 1",
        ("tests/eager/test_eager.py",),
    ),
    Fault(
        "float16-undivided",
        "float16 gradients are not divided before they are summed, and overflow",
        "divide_first",
        "1 << ((size - 1).bit_length() + 1) // 2",
        "1",
        ("tests/comm/test_collectives.py",),
    ),
    Fault(
        "reduction-message-order",
        "packed gradients are sent in the order of the buffer instead of rank by rank",
        "_orders",
        "order, torch.argsort(order)",
        "order, order",
        ("tests/comm/test_gather_plan.py",),
    ),
    Fault(
        "reduction-awaited-at-once",
        "a reduce-scatter is finished before the next unit's backward begins: no overlap",
        "reached_end_of_calls",
        "self._reduces.issue(flat, flat.grad_to_reduce(grads), unused)",
        "self._reduces.issue(flat, flat.grad_to_reduce(grads), unused), self._reduces.finish()",
        ("tests/eager/test_order.py",),
    ),
    Fault(
        "gradient-of-a-segment-lost",
        "of two calls of one unit only the second one's gradients count",
        "EndOfCalls._add",
        "list(grads) if before is None else sums(before, grads)",
        "list(grads)",
        ("tests/core/test_repeated_calls.py",),
    ),
    Fault(
        "unused-is-zero",
        "a parameter without a gradient gets zeros, which optimizers decay",
        "messages",
        "place.fill_(NO_VALUE)",
        "place.zero_()",
        ("tests/core/test_unused_parameters.py",),
    ),
    Fault(
        "replicas-not-reduced",
        "hybrid sharding: gradients are averaged inside a replica only",
        "issue_reduce",
        "over_replicas = partial(_issue_over_replicas, flat, groups[1], output)",
        "over_replicas = None",
        ("tests/comm/test_hybrid.py",),
    ),
    Fault(
        "clipping-counts-scalars-often",
        "the norm counts what is whole on each rank as often as there are ranks",
        "_by_groups",
        "(() if original.is_replicated else shard) + splits",
        "shard + splits",
        ("tests/core/test_placements.py", "tests/core/test_clipping.py"),
    ),
    # -- accumulation --------------------------------------------------------------------------
    Fault(
        "accumulation-overwrites",
        "of several steps under no_sync() the last one's gradient counts",
        "UnshardedSum.add",
        "self.total.data.add_(grad)",
        "self.total.data.copy_(grad)",
        ("tests/core/test_accumulation.py",),
    ),
    Fault(
        "reduced-gradient-divided-again",
        "a gradient that was reduced before no_sync() is divided by the number of ranks",
        "_add_parts",
        "self._layout.world_size if slot.copies == 1 else 1",
        "1",
        ("tests/core/test_accumulation.py",),
    ),
    # -- unshard and reshard -------------------------------------------------------------------
    Fault(
        "unsharded-memory-kept",
        "resharding frees nothing",
        "Unit.reshard",
        "not self.settings.keeps_storage",
        "self.settings.keeps_storage",
        ("tests/eager/test_order.py",),
    ),
    Fault(
        "reshards-against-the-strategy",
        "SHARD_GRAD_OP reshards after the forward, and gathers twice",
        "_reshards_after_forward",
        "unit.config.sharding_strategy.reshards_after_forward and not outermost",
        "not outermost",
        ("tests/wrap/test_fsdp2_methods.py", "tests/wrap/test_reshard_after_forward.py"),
    ),
    Fault(
        "prefetch-order",
        "the backward prefetches the unit that it needs last",
        "ended_before",
        "range(call.order - 1, -1, -1)",
        "range(call.order)",
        ("tests/eager/test_order.py",),
    ),
    Fault(
        "stale-after-a-step",
        "parameters written by the optimizer are not seen by a unit that is unsharded",
        "Unit.drop_outdated",
        "if not is_current:\n    self.reshard('forward')",
        "pass",
        ("tests/wrap/test_unsharded_by_hand.py", "tests/eager/test_values_a_forward_uses.py"),
    ),
    Fault(
        "stream-not-waited-for",
        "gathers run before the optimizer's writes, which are enqueued on the computing stream",
        "SideStreams.settle",
        "self._gathers.wait_stream(waited_for[0])",
        "None",
        ("tests/eager/test_streams.py",),
    ),
    Fault(
        "failed-backward-leaks",
        "autograd's node and the call hold each other",
        "_UnshardedViews.forward",
        "ctx.call = ref(call)",
        "ctx.call = lambda: call",
        ("tests/wrap/test_leaks.py",),
    ),
    # -- parameters ----------------------------------------------------------------------------
    Fault(
        "write-back-of-a-view",
        "parameters that exchange their storage both get the values of one",
        "_copy_replacements",
        "originals[i].part_of(param).clone()",
        "originals[i].part_of(param)",
        ("tests/core/test_write_back.py",),
    ),
    Fault(
        "replaced-parameter-unseen",
        "a parameter put in the place of another one is not used by the next forward",
        "are_unchanged",
        "holder.get(name) is not param",
        "False",
        ("tests/core/test_write_back.py",),
    ),
    Fault(
        "columns-packed-as-rows",
        "Shard(1): a gradient's columns are sent to ranks as if they were rows",
        "messages",
        "value.reshape(slot.blocks, size, -1).transpose(0, 1)",
        "value.reshape(size, slot.blocks, -1)",
        ("tests/comm/test_gather_plan.py",),
    ),
    Fault(
        "gather-hooks-keep-memory",
        "what fsdp_post_all_gather has made is not freed by the reshard",
        "HookedFlatParameter.storages_to_free",
        "super().storages_to_free() + [one for one in made if one.nbytes()]",
        "super().storages_to_free()",
        ("tests/core/test_gather_hooks.py",),
    ),
    Fault(
        "summon-write-back-hangs",
        "rank0_only: rank 0 does not send what it has changed, for which the others wait",
        "_SummonedFlat._write",
        "not self._has_whole or self._options.rank0_only",
        "not self._has_whole",
        ("tests/core/test_full_params.py",),
    ),
    Fault(
        "ignored-parameter-sharded",
        "a parameter of ignored_states becomes one of its unit",
        "_Walk.below",
        "param is not None and param not in self._ignored.parameters",
        "param is not None",
        ("tests/wrap/test_matrix.py",),
    ),
    Fault(
        "deferred-init-of-tied",
        "a tied parameter on the meta device is initialised by each of its holders",
        "_initialise",
        "tensor.copy_(value)",
        "None",
        ("tests/wrap/test_deferred_init.py",),
    ),
    Fault(
        "hierarchy-shard-order",
        "HIERARCHICAL_SHARD: ranks take shards by node and position instead of position and node",
        "hierarchy_of",
        "position * len(grid) + index",
        "index * len(row) + position",
        ("tests/comm/test_hierarchy.py",),
    ),
    Fault(
        "secondary-shards-stale",
        "secondary shards outlive a change of parameters between accumulated steps",
        "SecondaryShards.begin_forward",
        "keeps and all(unit.is_secondary_current for unit in self._units)",
        "keeps",
        ("tests/comm/test_secondary_shards.py",),
    ),
    # -- precision -----------------------------------------------------------------------------
    Fault(
        "params-cast-by-reduce-dtype",
        "reduce_dtype alone lowers the precision of parameters, too",
        "_set_precision",
        "precision.param_dtype or self.dtype",
        "precision.param_dtype or precision.reduce_dtype or self.dtype",
        ("tests/wrap/test_precision_in_eval.py", "tests/wrap/test_features.py"),
    ),
    Fault(
        "reduces-in-param-dtype",
        "reduce_dtype is not followed",
        "_set_precision",
        "precision.reduce_dtype or param_dtype",
        "param_dtype",
        ("tests/wrap/test_features.py",),
    ),
    Fault(
        "sums-in-reduce-dtype",
        "gradients accumulate in the lower one of two dtypes",
        "Dtypes.sum",
        "torch.promote_types(self.param, self.reduce)",
        "self.reduce",
        ("tests/core/test_accumulation.py",),
    ),
    Fault(
        "buffers-stay-low",
        "buffers get back the dtype that mixed precision gave them: state dicts have it",
        "cast_buffers",
        "dtypes[join_fqn(name, buffer_name)] = buffer.dtype",
        "dtypes[join_fqn(name, buffer_name)] = precision.buffer_dtype",
        ("tests/state_dict/test_state_dict.py",),
    ),
    Fault(
        "offload-keeps-device-memory",
        "the shard to gather is the offloaded one itself, not a copy on the device",
        "shard_on_device",
        "not self.is_offloaded",
        "True",
        ("tests/eager/test_offload.py",),
    ),
    Fault(
        "scale-of-the-largest",
        "quantisation: a block of negative numbers has too small a scale",
        "_bounds",
        "values.abs().amax(-1, keepdim=True)",
        "values.amax(-1, keepdim=True)",
        ("tests/comm/test_wire_codec.py",),
    ),
    # -- state dicts and checkpoints -----------------------------------------------------------
    Fault(
        "state-dict-shares-memory",
        "a sharded state dict changes with the next step",
        "_value_to_keep",
        "value.clone() if settings.copies_model else value",
        "value",
        ("tests/state_dict/test_sharded_state_dict.py",),
    ),
    Fault(
        "optimizer-rows-of-another-rank",
        "states of an optimizer are gathered from the rank's own values for another parameter",
        "gather_states",
        "[local_of(own[i]) if i in own else None for i in range(len(flat.originals))]",
        """
        [
            local_of(own[i]) if i in own else None
            for i in reversed(range(len(flat.originals)))
        ]
        """,
        ("tests/state_dict/test_optim_state.py",),
    ),
    Fault(
        "optimizer-state-aliased",
        "a loaded optimizer changes the state dict that it was loaded from",
        "_loaded",
        "copied(part) if copies else part",
        "part",
        ("tests/state_dict/test_sharded_state_dict.py",),
    ),
    Fault(
        "dcp-drops-states",
        "states in a file that the template lacks are lost without a word",
        "_require_all_states",
        "set(state) - set(states.get(fqn, ())) if fqn in members else ()",
        "()",
        ("tests/state_dict/test_resume.py",),
    ),
    Fault(
        "publish-without-fsync",
        "a checkpoint's name may be lost by a power failure after save() has returned",
        "publish",
        "fsync_folder(path.parent)",
        "None",
        ("tests/checkpoint/test_checkpoint.py",),
    ),
    Fault(
        "checksums-by-size",
        "damage that leaves a file's size alone is loaded",
        "require_checksums",
        "found != expected",
        "found.size != expected.size",
        ("tests/checkpoint/test_checkpoint_faults.py",),
    ),
    # -- graph mode ----------------------------------------------------------------------------
    Fault(
        "graph-saves-unsharded",
        "graph mode saves unsharded parameters for the backward whatever the strategy says",
        "tag_reshard_after_forward",
        "reshards = mark.reshards and mark.unit not in kept",
        "reshards = False",
        ("tests/graph_passes/test_passes.py",),
    ),
    Fault(
        "one-more-in-flight",
        "the schedule has one gather more in flight than max_in_flight",
        "_in_flight",
        "of_kind[placement.wait] -= 1",
        "of_kind[max(placement.issue, placement.wait - 1)] -= 1",
        ("tests/graph_passes/test_reasons.py",),
    ),
    Fault(
        "bucket-after-its-use",
        "a bucket may begin after the first of its members is needed",
        "_belong_together",
        "return ready <= min(one.need, other.need)",
        "return True",
        ("tests/graph_passes/test_schedule.py",),
    ),
    Fault(
        "gather-as-early-as-late",
        "the planner prefetches nothing: every gather where it is needed",
        "place_just_in_time",
        "max(transfer.ready, min(in_time, _one_unit_ahead(starts, transfer)))",
        "transfer.need",
        ("tests/graph_passes/test_schedule.py",),
    ),
    Fault(
        "memory-in-flight-uncounted",
        "the memory model frees what a collective sends at its issue",
        "_last_use",
        "end = max([end, *(index[wait] for wait in user.users if is_wait(wait))])",
        "pass",
        ("tests/graph_mode/test_memory_model.py",),
    ),
    Fault(
        "regions-of-other-keywords",
        "units that differ in a keyword argument of an operator share compiled code",
        "Numbered.key_of",
        "self.plain(node.kwargs)",
        "()",
        ("tests/graph_mode/test_regions.py",),
    ),
    Fault(
        "gradient-buffer-gaps",
        "parts of the flat gradient that nothing writes hold what was in memory before",
        "_rewrite",
        "gaps += [begin, begin + slot.numel()]",
        "gaps += [begin, begin]",
        ("tests/graph_mode/test_grad_buffer.py",),
    ),
    Fault(
        "plans-not-shared",
        "ranks whose batches differ launch collectives in different orders",
        "Planner._agreed",
        "launches_of(agreed) == launches_of(placed.plan)",
        "True",
        ("tests/graph_mode/test_shared_plans.py",),
    ),
    Fault(
        "cache-key-without-units",
        "two graphs that differ in their units alone share compiled code",
        "marks_key",
        "[custom.get(key) for key in _MARKS]",
        "[]",
        ("tests/graph_mode/test_graph_mode.py",),
    ),
    # -- hooks mode ----------------------------------------------------------------------------
    Fault(
        "leaf-output-unchecked",
        "the graph around a unit takes any output for the one that it was made for",
        "run_leaf",
        "spec == assumed.spec and all(map(_is_as_assumed, tensors, assumed.facts))",
        "True",
        ("tests/hooks_mode/test_leaves.py",),
    ),
    Fault(
        "recomputes-with-sharded",
        "the backward's checkpointed code sees DTensors, not the views of this step",
        "pre_backward",
        "call.show_views()",
        "None",
        ("tests/wrap/test_checkpointing.py",),
    ),
    Fault(
        "segment-grad-mode",
        "segments behind torch.no_grad() in a root are compiled with gradients",
        "_grad_mode_after",
        "bool(changes[-1].args[0]) if changes else torch.is_grad_enabled()",
        "torch.is_grad_enabled()",
        ("tests/wrap/test_grad_modes.py", "tests/hooks_mode/test_hooks_mode.py"),
    ),
    # -- health --------------------------------------------------------------------------------
    Fault(
        "order-not-compared",
        "ranks that issue other collectives wait for each other",
        "_first_difference",
        "mine is not None and mine.signature != entry.signature",
        "False",
        ("tests/health/test_divergence.py",),
    ),
    Fault(
        "failure-not-announced",
        "ranks are not told which error has ended another one",
        "announce_failure",
        "partial(_monitor.count_raised, RankFailedError(message))",
        "lambda: None",
        ("tests/health/test_faults.py",),
    ),
    Fault(
        "late-rank-unnamed",
        "a rank that is late is waited for in silence",
        "_Monitor.look",
        "num_periods == _WARNED_AT",
        "False",
        ("tests/health/test_agreement.py",),
    ),
    Fault(
        "request-unheard",
        "a rank whose device does not stand still does not compare when another rank asks",
        "_Monitor.look_in_passing",
        "comparison.num_requests != count",
        "False",
        ("tests/health/test_devices.py", "tests/health/test_scale.py"),
    ),
    Fault(
        "notice-raised-twice",
        "an error that was raised and caught is raised again by the next wait",
        "_Notices.count_raised",
        "self._unraised.popleft()",
        "None",
        ("tests/health/test_agreement.py",),
    ),
    Fault(
        "order-compared-by-size",
        "units of equal size in another order are not told from each other",
        "_number_of",
        'zlib.crc32(f"{kind} {label} {numel} {use}".encode())',
        'zlib.crc32(f"{kind} {numel}".encode())',
        ("tests/health/test_devices.py",),
    ),
    Fault(
        "aborted-gradients-used",
        "an optimizer steps with gradients that aborted collectives did not bring",
        "check_optimizer",
        "raise_if_failed()",
        "None",
        ("tests/health/test_devices.py",),
    ),
    # -- tools ---------------------------------------------------------------------------------
    Fault(
        "estimator-bytes",
        "the estimator lets a rank send its own shard, too",
        "StepTransfers.gather",
        "message_bytes * (ranks - 1) // ranks",
        "message_bytes",
        ("tests/estimator/test_estimator.py",),
    ),
    # -- captures ------------------------------------------------------------------------------
    Fault(
        "capture-held",
        "a forward is replayed over the saved tensors of one that waits for its backward",
        "may_run",
        "not self._is_awaited",
        "True",
        ("tests/graph_mode/test_captures.py",),
    ),
    Fault(
        "capture-outputs",
        "what leaves a captured graph is overwritten by the next replay",
        "_replayed",
        "outputs[i] = copy",
        "pass",
        ("tests/graph_mode/test_captures.py",),
    ),
    Fault(
        "capture-moved",
        "a replay reads shards where they were before they moved",
        "__call__",
        "capture is None or self._has_moved(capture, inputs)",
        "capture is None",
        ("tests/graph_mode/test_captures.py",),
    ),
    Fault(
        "capture-absent",
        "a replay forgets which gradients no rank has",
        "_replayed",
        "self._absent.setdefault(key, []).extend(ranges)",
        "len(ranges)",
        ("tests/graph_mode/test_captures.py",),
    ),
)
