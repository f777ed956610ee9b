"""Of the instruction sets of a CPU only the best is probed; which one Inductor takes stays."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import cpu_vec_isa

from fsdp_dynamo.graph_mode import compile_cache
from fsdp_dynamo.graph_mode.inductor import vectorization

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="nothing is probed here"
)


class Instructions(cpu_vec_isa.VecISA):
    """An instruction set that counts its probes."""

    def __init__(self, flags: str, width: int, works: bool = True) -> None:
        self._flags, self._bit_width, self.works = flags, width, works
        self.probes = 0

    def __str__(self) -> str:
        return self._flags

    __hash__ = object.__hash__

    def build_arch_flags(self) -> str:
        return ""

    def check_build(self, code: str) -> bool:
        self.probes += 1
        return self.works


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Instructions]]:
    """Instruction sets that Inductor knows; the processor has all but the first."""
    known = [Instructions("tiles", 512), Instructions("wide", 512), Instructions("narrow", 256)]
    monkeypatch.setattr(compile_cache, "own_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", known)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["narrow", "wide"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    yield known
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def _picked() -> cpu_vec_isa.VecISA:
    with torch._inductor.config.patch(vectorization([torch.ones(1)])):
        return cpu_vec_isa.pick_vec_isa()


def test_only_the_best_is_probed_once_for_a_cache(known: list[Instructions]) -> None:
    assert _picked() is known[1]
    assert [one.probes for one in known] == [0, 1, 0]
    known[1] = Instructions("wide", 512)  # as in the next process
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    assert _picked() is known[1]
    assert [one.probes for one in known] == [0, 0, 0]


def test_nothing_is_probed_for_another_device(known: list[Instructions]) -> None:
    assert vectorization([torch.ones(1, device="meta")]) == {}
    assert [one.probes for one in known] == [0, 0, 0]


def test_all_are_probed_if_the_best_does_not_work(known: list[Instructions]) -> None:
    known[1].works = False
    assert vectorization([]) == {}
    assert _picked() is known[2]
    assert [one.probes for one in known] == [0, 1, 1]


@pytest.mark.parametrize(
    ("setting", "value", "picked"),
    [("cpp.simdlen", 256, 2), ("cpp.vec_isa_ok", True, 1), ("cpp.vec_isa_ok", False, None)],
)
def test_users_word_counts(
    known: list[Instructions], setting: str, value: int, picked: int | None
) -> None:
    expected = cpu_vec_isa.invalid_vec_isa if picked is None else known[picked]
    with torch._inductor.config.patch({setting: value}):
        assert _picked() is expected
    assert setting == "cpp.simdlen" or not any(one.probes for one in known)
