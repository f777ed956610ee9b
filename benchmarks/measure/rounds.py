"""Interleaved measurement: every peer takes one step a round, so that drift hits all alike."""

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


@dataclass
class Samples:
    """What one peer's steps gave on this rank, warm-up steps included only where said.

    Attributes:
        peer: whose they are.
        reason: why there are none, or ``None``.
        losses: of every step from the first.
        forward_ms, backward_ms, update_ms: of every timed step.
        sent_bytes: leaving this rank's interface in every timed step, where there is a counter.
        first_step_s: seconds of the first step, compilation included.
        profile: what one further step did.
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
    """The first rank's reason not to go on, if any has one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((f"rank {rank}: {r}" for rank, r in enumerate(reasons) if r is not None), None)


def attempt(action: Callable[[], None]) -> str | None:
    """Run it; its error as one line, the same on all ranks, or ``None``."""
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
        peers: whom to compare, in the order of the rounds.
        setting: what they share.
        rank: whose batches to use.
    """

    def __init__(self, peers: list[Peer], setting: Setting, rank: int) -> None:
        self.setting = setting
        self.rank = rank
        self.samples = {peer.key: Samples(peer) for peer in peers}
        self.trainees: dict[str, Trainee] = {}

    def start(self, warmup: int = 2, say: Callable[[str], None] = lambda _: None) -> None:
        """Build every peer and take its first steps; who fails is left out with the reason."""
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
        """The timed rounds; every other one goes backwards through the peers."""
        for number in range(rounds):
            keys = list(self.trainees)
            for key in keys if number % 2 == 0 else reversed(keys):
                self.step(key, timed=True)
            say(f"round {number + 1} of {rounds}")

    def profile(self) -> None:
        """One further step of each peer, profiled: its collectives and its peak bytes."""
        for key in self.trainees:
            self.samples[key].profile = self.profile_one(key)

    def profile_one(self, key: str) -> StepProfile:
        """One further step of one peer, profiled."""
        trainee = self.trainees[key]
        profiler = StepProfiler(trainee.model, trainee.optimizer)
        batch = self.setting.workload.batch_of(self.rank, 0, self.setting.device)
        with profiler.recording() as profile:
            trainee.backward(trainee.forward(batch))
            profiler.note_gradients()
            trainee.update()
        return profile

    def step(self, key: str, timed: bool) -> None:
        """One training step of one peer, all ranks starting together."""
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


def slowest(values: list[float]) -> list[float]:
    """Element by element the most over ranks: a step is as long as its slowest rank's."""
    if not dist.is_initialized() or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    most: list[float] = tensor.tolist()
    return most


def mean_over_ranks(values: list[float]) -> list[float]:
    """Element by element the mean over ranks."""
    if not dist.is_initialized() or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    means: list[float] = (tensor / dist.get_world_size()).tolist()
    return means


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def round_ratios(values: list[float], reference: list[float]) -> dict[str, float]:
    """Spread of the ratio to a reference, round by round, so that drift cancels."""
    return spread([own / other for own, other in zip(values, reference, strict=True)])
