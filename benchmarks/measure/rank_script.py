"""Scripts that measure rows of one decoder on ranks: arguments, ranks, steps, table, record."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.command_line import at_least, one_line_on_bad_input, output_file
from benchmarks.measure.ranks import become_ranks, process_group
from benchmarks.measure.report import record, write
from benchmarks.measure.rounds import slowest, spread
from benchmarks.peers import Setting, named
from benchmarks.workloads.catalogue import DECODER_SIZES, decoder

Rows = TypeVar("Rows", bound=Mapping[str, Any])
Round = dict[str, float]


def run_script(
    kind: str,
    description: str,
    measure: Callable[[Setting, int], Rows],
    report: Callable[[Rows], str],
    *,
    decoder_size: str,
    rounds: int,
    **facts: Any,
) -> None:
    """Parse the command line, measure on all ranks, print the table and write the record.

    Args:
        kind: kind of the record.
        description: the script's docstring.
        measure: called on every rank with the setting and the number of rounds.
        report: formats what ``measure`` returned.
        decoder_size: default size of the decoder.
        rounds: default number of rounds.
        facts: further entries of the record.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--decoder", choices=list(DECODER_SIZES), default=decoder_size)
    parser.add_argument("--world_size", type=at_least(2), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=rounds)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    become_ranks(options.world_size)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with one_line_on_bad_input(), process_group("cpu") as device:
        rows = measure(Setting(decoder(options.decoder), device), options.rounds)
        if dist.get_rank() == 0:
            print(f"decoder {options.decoder}, {options.world_size} ranks, gloo\n{report(rows)}")
            if options.json is not None:
                facts |= {"decoder": options.decoder, "world_size": options.world_size}
                write(options.json, record(kind, **facts, rows=rows))


class Training:
    """Training steps of one peer on this rank."""

    def __init__(self, key: str, setting: Setting) -> None:
        (peer,) = named([key])
        self.title = peer.title
        self.setting = setting
        self.trainee = peer.train(setting)
        self.num_steps = 0

    def train(self) -> None:
        """Run one step."""
        batch = self.setting.workload.batch_of(dist.get_rank(), self.num_steps, self.setting.device)
        self.trainee.train_step(batch)
        self.num_steps += 1


def slowest_ms(action: Callable[[], object]) -> float:
    """Milliseconds that an action took on the slowest rank."""
    began = time.perf_counter()
    action()
    return slowest([(time.perf_counter() - began) * 1e3])[0]


def interleaved(measures: Mapping[str, Callable[[], Round]], rounds: int) -> dict[str, list[Round]]:
    """Results of each row, measured one after the other in every round."""
    results: dict[str, list[Round]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            results[name].append(measure())
    return results


def spreads(rounds: list[Round]) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum over the rounds, by column."""
    return {name: spread([one[name] for one in rounds]) for name in rounds[0]}
