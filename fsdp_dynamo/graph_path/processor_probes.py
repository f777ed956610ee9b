"""Inductor's probes of the processor: only as far as an answer is needed."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._inductor import cpu_vec_isa


@contextmanager
def best_probed() -> Iterator[None]:
    """While open, Inductor probes instruction sets, best first, until one works.

    By itself it probes all that the processor has, and takes the best of them: on one with AVX-512
    that is three compilations of 2 to 3 s for one answer. Where the user asks for another set all
    are probed, and where there are no probes nothing changes: beyond Linux on x86.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        yield
        return
    probe_all = cpu_vec_isa.valid_vec_isa_list

    def probe() -> list[cpu_vec_isa.VecISA]:
        if torch._inductor.config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ:
            return probe_all()
        flags = cpu_vec_isa.x86_isa_checker()
        known = (
            one for one in cpu_vec_isa.supported_vec_isa_list if {*str(one).split()} <= {*flags}
        )
        best = next((one for one in known if one), None)  # its truth is the probe
        return [] if best is None else [best]

    cpu_vec_isa.valid_vec_isa_list = probe  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = probe_all


__all__ = ["best_probed"]
