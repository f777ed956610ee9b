"""Interleaved measurement: one step of every peer per round, so that drift affects all alike."""

from __future__ import annotations

import itertools
import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.measure import wire
from benchmarks.measure.step_profile import StepProfile, StepProfiler
from benchmarks.peers import Peer, Setting, Trainee
from benchmarks.workloads.catalogue import Batch


@dataclass
class Samples:
    """Samples of one peer's steps on this rank.

    Attributes:
        peer: the peer.
        reason: reason why there are no samples, or ``None``.
        losses: losses of all steps, warm-up included.
        forward_ms, backward_ms, update_ms: times of every timed step.
        sent_bytes: bytes that left this rank's interface in every timed step, if it has a counter.
        first_step_s: seconds of the first step, compilation included.
        profile: profile of one further step.
    """

    peer: Peer
    reason: str | None = None
    losses: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    first_step_s: float = math.nan
    profile: StepProfile | None = None


def synchronize(device: torch.device) -> None:
    """Wait for everything that was issued on an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def agreed(reason: str | None) -> str | None:
    """The reason of the first rank that cannot go on, if there is one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((f"rank {rank}: {r}" for rank, r in enumerate(reasons) if r is not None), None)


def attempt(action: Callable[[], None]) -> str | None:
    """Run an action; returns its error as one line, the same on all ranks, or ``None``."""
    try:
        action()
        reason = None
    except Exception as error:  # a peer's failure is a result of the comparison
        traceback.print_exc()
        line = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {line[:160]}"
    return agreed(reason)


class Comparison:
    """All peers of one run on one rank.

    Args:
        peers: peers to compare, in the order of the rounds.
        setting: setting that they share.
        rank: rank whose batches to use.
    """

    def __init__(self, peers: list[Peer], setting: Setting, rank: int) -> None:
        self.setting = setting
        self.rank = rank
        self.samples = {peer.key: Samples(peer) for peer in peers}
        self.trainees: dict[str, Trainee] = {}

    def start(self, warmup: int = 2, say: Callable[[str], None] = lambda _: None) -> None:
        """Build every peer and run its first steps; leave out peers that fail, with the reason."""
        for key, samples in self.samples.items():
            # Agreed on after each part: a rank that goes on alone waits in a collective.
            samples.reason = (
                agreed(samples.peer.why_not(self.setting))
                or attempt(lambda key=key: self._build(key))
                or attempt(lambda key=key: self._first_steps(key, warmup))
            )
            if samples.reason is not None:
                self.trainees.pop(key, None)
            say(f"{samples.peer.title}: {samples.reason or f'{samples.first_step_s:.1f} s'}")

    def _build(self, key: str) -> None:
        self.trainees[key] = self.samples[key].peer.train(self.setting)

    def _first_steps(self, key: str, warmup: int) -> None:
        samples = self.samples[key]
        began = time.perf_counter()
        self.step(key, timed=False)
        samples.first_step_s = time.perf_counter() - began
        for _ in range(warmup - 1):
            self.step(key, timed=False)

    def run(self, rounds: int, say: Callable[[str], None] = lambda _: None) -> None:
        """Run the timed rounds; every other round takes the peers in reverse order."""
        for number in range(rounds):
            keys = list(self.trainees)
            for key in keys if number % 2 == 0 else reversed(keys):
                self.step(key, timed=True)
            say(f"round {number + 1} of {rounds}")

    def profile(self) -> None:
        """Profile one further step of each peer: its collectives and its peak bytes."""
        for key in self.trainees:
            self.samples[key].profile = self.profile_one(key)

    def profile_one(self, key: str) -> StepProfile:
        """Profile one further step of one peer."""
        batch = self.setting.workload.batch_of(self.rank, 0, self.setting.device)
        return profiled_step(self.trainees[key], batch)

    def step(self, key: str, timed: bool) -> None:
        """Run one training step of one peer, which all ranks start together."""
        trainee, samples = self.trainees[key], self.samples[key]
        device = self.setting.device
        batch = self.setting.workload.batch_of(self.rank, len(samples.losses), device)
        synchronize(device)
        if dist.is_initialized():
            dist.barrier()
        sent = wire.sent_bytes()
        times = [time.perf_counter()]
        loss = trainee.forward(batch)
        synchronize(device)
        times.append(time.perf_counter())
        trainee.backward(loss)
        synchronize(device)
        times.append(time.perf_counter())
        trainee.update()
        synchronize(device)
        times.append(time.perf_counter())
        samples.losses.append(loss.item())
        if timed:
            forward, backward, update = (
                (end - begin) * 1e3 for begin, end in itertools.pairwise(times)
            )
            samples.forward_ms.append(forward)
            samples.backward_ms.append(backward)
            samples.update_ms.append(update)
            after = wire.sent_bytes()
            if sent is not None and after is not None:
                samples.sent_bytes.append(after - sent)


def profiled_step(trainee: Trainee, batch: Batch) -> StepProfile:
    """Profile of one step."""
    profiler = StepProfiler(trainee.model, trainee.optimizer)
    with profiler.recording() as profile:
        trainee.backward(trainee.forward(batch))
        profiler.note_gradients()
        trainee.update()
    return profile


def slowest(values: list[float]) -> list[float]:
    """Element-wise maximum over ranks: a step takes as long as on its slowest rank."""
    if not dist.is_initialized() or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    most: list[float] = tensor.tolist()
    return most


def mean_over_ranks(values: list[float]) -> list[float]:
    """Element-wise mean over ranks."""
    if not dist.is_initialized() or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    means: list[float] = (tensor / dist.get_world_size()).tolist()
    return means


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def round_ratios(values: list[float], reference: list[float]) -> dict[str, float]:
    """Spread of the ratio to a reference, round by round, so that drift cancels."""
    return spread([own / other for own, other in zip(values, reference, strict=True)])
