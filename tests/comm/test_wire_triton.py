"""Triton kernels against the CPU's: interpreted, and compiled for an H100. They need Triton."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch

from fsdp_dynamo.comm import wire_codec, wire_kernels
from graph_passes.markers import NO_VALUE
from graph_passes.wire_format import WIRE_FORMATS, WireFormat

pytest.importorskip("triton")
from fsdp_dynamo.comm import wire_triton

IS_INTERPRETED = "TRITON_INTERPRET" in os.environ  # read when Triton is imported
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="test_interpreted runs it")
compiled = pytest.mark.skipif(IS_INTERPRETED, reason="needs the compiler")
TOOL = Path(__file__).parents[2] / "tools" / "triton_kernels.py"
CPU = torch.device("cpu")
STEPS = {"bfloat16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}
"""Most that elements differ where one rounds up and one down, relative to the block's largest."""


def _values(numel: int, dtype: torch.dtype, lacks: bool, is_finite: bool) -> torch.Tensor:
    values = torch.randn(3, numel)
    if lacks:
        values[:, ::5] = NO_VALUE
    if numel > 300 and not is_finite:
        values[0, 3], values[1, 299] = torch.nan, torch.inf
    return values.to(dtype)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Elements as integers, all NaN alike."""
    as_int = torch.int32 if values.dtype == torch.float32 else torch.int16
    return values.view(as_int).masked_fill(values.isnan(), 1)


def _ran(*command: str, **variables: str) -> str:
    """Output of a Python program that succeeds."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@compiled
def test_interpreted() -> None:
    out = _ran("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
    assert re.search(r"^50 passed", out, re.MULTILINE), out


@interpreted
@pytest.mark.parametrize("name", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block", "numel"), [(64, 4096), (64, 2049), (24, 1000), (256, 7)])
def test_equal_to_the_kernels_of_a_cpu(
    name: str, dtype: torch.dtype, block: int, numel: int
) -> None:
    """Bitwise, but for casts to bfloat16, which Triton's interpreter truncates.

    Its casts to float8 carry no bit into the exponent, and float8's NaN becomes a number: such
    messages are only decoded.
    """
    torch.manual_seed(1)
    wire, cpu = WireFormat(name, block), wire_codec.kernels_of(CPU, WireFormat("int8"))  # type: ignore[arg-type]
    for lacks in (False, True):
        parts = _values(numel, dtype, lacks, is_finite=name == "float8")
        sent = torch.zeros(3, wire.num_bytes(numel), dtype=torch.uint8)
        expected = sent.clone()
        cpu.encode(parts, expected, wire, lacks)
        wire_triton.encode(parts, sent, wire, lacks, own=1)
        assert not sent[1].any()
        decoded, others = torch.empty_like(parts), torch.empty_like(parts)
        cpu.decode(decoded, expected, wire)
        wire_triton.decode(others, expected, wire)
        total, other = parts[2].clone(), parts[2].clone()
        cpu.add(total, total, list(expected), wire, 3.0, 2)
        wire_triton.add(other, other, expected, wire, 3.0, 2)
        if dtype == torch.bfloat16:
            torch.testing.assert_close(others, decoded, rtol=2**-7, atol=0, equal_nan=True)
            torch.testing.assert_close(other, total, rtol=2**-7, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(_bits(others), _bits(decoded))
            assert torch.equal(_bits(other), _bits(total))
        wire_triton.decode(others, sent, wire)
        if wire.is_integer and dtype != torch.bfloat16:
            assert torch.equal(_bits(others[::2]), _bits(decoded[::2]))
        if name == "float8":
            continue
        largest = parts.float().nan_to_num(0, 0, 0).abs().max().item()
        torch.testing.assert_close(
            others[::2],
            decoded[::2],
            rtol=2**-7,
            atol=STEPS[name] * largest,
            equal_nan=True,
        )


@interpreted
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_noise(name: str) -> None:
    """It rounds up as often as it should, differs between elements and calls, and repeats."""
    wire = WireFormat(name, 64, is_stochastic=True)  # type: ignore[arg-type]
    parts = torch.full((2, 8192), 0.3)
    parts[:, ::64] = {"int8": 126.999, "int4": 6.999}[name]
    sent = torch.zeros(4, 2, wire.num_bytes(8192), dtype=torch.uint8)
    wire_kernels.begin_noise()
    with wire_kernels.noise_unchanged():
        for messages in sent[:2]:
            wire_triton.encode(parts, messages, wire, may_lack=False)
    for messages in sent[2:]:
        wire_triton.encode(parts, messages, wire, may_lack=False)
    assert torch.equal(sent[:2], sent[2:])
    got = torch.empty(2, 2, 8192)
    for output, messages in zip(got, sent, strict=False):
        wire_triton.decode(output, messages, wire)
    rounded = got.view(4, -1, 64)[..., 1:]
    ups = rounded > 0.5
    assert ((rounded - ups.float()).abs() < 1e-3).all()
    deviation = (0.3 * 0.7 / ups[0].numel()) ** 0.5
    assert (ups.float().mean((1, 2)) - 0.3).abs().max() < 4 * deviation
    for one, other in combinations(ups, 2):
        assert abs((one & other).float().mean() - 0.09) < 4 * deviation


@compiled
def test_as_compiled_for_an_h100() -> None:
    """No register spills, and whole blocks are loaded or stored 16 bytes at a time."""
    lines = _ran(str(TOOL)).splitlines()
    assert len(lines) == 3 * 2 * len(WIRE_FORMATS)
    for line in lines:
        assert re.search(r"stack  0 ", line), line
        assert re.search(r"\d x (LDG|STG) 16", line), line
        assert "LDL" not in line, line
        if not line.startswith("_decode  int4"):
            assert re.search(r"\d x LDG 16", line), line
