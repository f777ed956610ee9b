"""Instruction sets are probed until one works; which one Inductor takes does not change."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import cpu_vec_isa

from fsdp_dynamo.graph_mode.calibration import best_probed

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="nothing is probed here"
)


class Instructions:
    """An instruction set that counts its probes."""

    def __init__(self, flags: str, width: int, works: bool = True) -> None:
        self.flags, self.width, self.works = flags, width, works
        self.probes = 0

    def __str__(self) -> str:
        return self.flags

    def __bool__(self) -> bool:
        self.probes += 1
        return self.works

    def bit_width(self) -> int:
        """Of a vector."""
        return self.width


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Instructions]]:
    """What Inductor knows of; the processor has all but the first, the compiler not the next."""
    known = [
        Instructions("tiles wide", 512),
        Instructions("wide odd", 512, works=False),
        Instructions("wide", 512),
        Instructions("narrow", 256),
        Instructions("narrower", 128),
    ]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", known)
    flags = ["narrower", "narrow", "odd", "wide"]
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: flags)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    yield known
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def test_probes_end_at_the_first_that_works(known: list[Instructions]) -> None:
    with best_probed():
        found = cpu_vec_isa.pick_vec_isa()
    assert found is known[2]
    assert [one.probes for one in known] == [0, 1, 1, 0, 0]
    assert cpu_vec_isa.pick_vec_isa() is found
    assert [one.probes for one in known] == [0, 2, 2, 1, 1]  # Inductor by itself


def test_none_works(known: list[Instructions]) -> None:
    for one in known:
        one.works = False
    with best_probed():
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa


def test_users_width(known: list[Instructions]) -> None:
    with best_probed(), torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert cpu_vec_isa.pick_vec_isa() is known[3]


def test_users_set(known: list[Instructions], monkeypatch: pytest.MonkeyPatch) -> None:
    known[3].flags = "avx2"
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "wide"])
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with best_probed():
        assert cpu_vec_isa.pick_vec_isa() is known[3]


def test_an_error_leaves_nothing_behind() -> None:
    before = cpu_vec_isa.valid_vec_isa_list
    with pytest.raises(ZeroDivisionError), best_probed():
        raise ZeroDivisionError
    assert cpu_vec_isa.valid_vec_isa_list is before


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, int]]:
    """Starts anew with a cache folder; returns what is picked, and how often code was loaded."""
    loaded: list[str] = []

    def load(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        loaded.append(isa.build_arch_flags())
        return True

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", load)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)

    def start(folder: str) -> tuple[str, int]:
        loaded.clear()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
        # Answers are kept by class: a new one knows nothing.
        kind = type("Wide", (cpu_vec_isa.VecAVX512,), {})
        monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [kind()])
        with best_probed():
            flags = cpu_vec_isa.pick_vec_isa().build_arch_flags()
        return flags, len(loaded)

    return start


def test_a_later_start_picks_the_same_and_loads_nothing(
    loads: Callable[[str], tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    picked, num_loads = loads("one")
    assert num_loads == 2
    assert "-mavx512bf16" in picked  # a second probe, of what the set has besides
    assert loads("one") == (picked, 0)
    assert loads("other") == (picked, 2)
    monkeypatch.setattr(
        cpu_vec_isa, "_get_isa_dry_compile_fingerprint", lambda flags: f"new{flags}"
    )
    assert loads("one") == (picked, 2)


def test_what_does_not_load_is_tried_again(
    loads: Callable[[str], tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    picked, _ = loads("one")
    with monkeypatch.context() as other:
        other.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: False)
        assert loads("other") == ("", 0)
        assert loads("one") == (picked, 0)
    assert loads("other") == (picked, 2)


def test_a_folder_that_cannot_be_made_is_no_error(
    loads: Callable[[str], tuple[str, int]], tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "fsdp_dynamo").write_text("")
    first, again = loads("one"), loads("one")
    assert first == again
    assert first[1] == 2
