"""Inductor's probes of the processor: only as far as needed, and once for a cache folder."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch._inductor import cpu_vec_isa

from fsdp_dynamo.graph_path.compile_cache import own_file


@contextmanager
def best_probed() -> Iterator[None]:
    """While open, Inductor probes instruction sets, best first, until one works.

    By itself it probes all that the processor has, and takes the best of them: on one with AVX-512
    that is three compilations of 2 to 3 s for one answer. Where the user asks for another set all
    are probed, and where there are no probes nothing changes: beyond Linux on x86.

    What a probe has compiled was also loaded by a process of its own, in every start. Here that is
    done once for each folder of the cache.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        yield
        return
    probe_all, check_build = cpu_vec_isa.valid_vec_isa_list, cpu_vec_isa.VecISA.check_build

    def probe() -> list[cpu_vec_isa.VecISA]:
        if torch._inductor.config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ:
            return probe_all()
        flags = cpu_vec_isa.x86_isa_checker()
        known = (
            one for one in cpu_vec_isa.supported_vec_isa_list if {*str(one).split()} <= {*flags}
        )
        best = next((one for one in known if one), None)  # its truth is the probe
        return [] if best is None else [best]

    def check_once(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        mark = _mark_of(isa, code)
        if mark.exists():
            return True
        works: bool = check_build(isa, code)
        if works:
            with suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
        return works

    cpu_vec_isa.valid_vec_isa_list = probe  # type: ignore[assignment]
    cpu_vec_isa.VecISA.check_build = check_once  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = probe_all
        cpu_vec_isa.VecISA.check_build = check_build  # type: ignore[method-assign]


def _mark_of(isa: cpu_vec_isa.VecISA, code: str) -> Path:
    """File that is there if the code was built and loaded, by this compiler and this torch."""
    fingerprint = cpu_vec_isa._get_isa_dry_compile_fingerprint(isa.build_arch_flags())
    return own_file(".probe", code, fingerprint, torch.__file__)


__all__ = ["best_probed"]
