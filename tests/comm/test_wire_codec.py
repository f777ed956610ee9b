"""Messages in fewer bits: what arrives, how far off it may be, and what no code can say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_dynamo.comm import wire_codec
from graph_passes.markers import NO_VALUE
from graph_passes.wire_format import WIRE_FORMATS, WireFormat

LARGEST_ERROR = {"bfloat16": 2**-8, "float8": 2**-4, "int8": 1 / 254}
"""Of an element, as a part of the largest one in its block."""


def _arrived(values: torch.Tensor, num_parts: int, wire: WireFormat) -> torch.Tensor:
    sent = wire_codec.encode(values, num_parts, wire, may_lack=True)
    assert sent.numel() == num_parts * wire.num_bytes(values.numel() // num_parts)
    output = torch.full_like(values, 7.0)
    wire_codec.decode(output, sent, num_parts, wire)
    return output


def _bounds(values: torch.Tensor, num_parts: int, block: int) -> torch.Tensor:
    """The largest absolute value of each element's block."""
    found = []
    for part in values.view(num_parts, -1):
        for piece in part.split(block):
            found.append(piece.abs().max().expand(piece.shape))
    return torch.cat(found)


@given(
    name=st.sampled_from(WIRE_FORMATS),
    num_parts=st.integers(1, 5),
    numel=st.integers(1, 700),
    block=st.sampled_from([8, 64, 256]),
    exponent=st.integers(-12, 12),
    tile=st.sampled_from([16, 256, 1 << 18]),
    seed=st.integers(0, 1000),
)
def test_error_is_bounded_by_the_block(
    name: str, num_parts: int, numel: int, block: int, exponent: int, tile: int, seed: int
) -> None:
    torch.manual_seed(seed)
    wire = WireFormat(name, block)  # type: ignore[arg-type]
    values = torch.randn(num_parts * numel) * 10.0**exponent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_codec, "_TILE_NUMEL", tile)
        got = _arrived(values, num_parts, wire)
    allowed = LARGEST_ERROR[name] * _bounds(values, num_parts, block) * 1.001
    assert ((got - values).abs() <= allowed).all()


@pytest.mark.parametrize("name", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 5, 600).to(dtype)
    got = _arrived(values, 2, WireFormat(name))  # type: ignore[arg-type]
    assert got.dtype is dtype
    assert (got - values).abs().max() <= (LARGEST_ERROR[name] + 2**-8) * 5


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_zeros_and_what_is_not_there(name: str) -> None:
    values = torch.ones(64)
    values[:32] = NO_VALUE
    values[32:40] = 0.0
    got = _arrived(values, 1, WireFormat(name, 16))  # type: ignore[arg-type]
    assert torch.equal(got, values)
    assert torch.equal(got.signbit(), values.signbit())
    mixed = torch.arange(16.0)
    mixed[3] = NO_VALUE
    got = _arrived(mixed, 1, WireFormat(name, 16))  # type: ignore[arg-type]
    assert got[3] == 0
    assert bool(got[3].signbit())
    assert not bool(got[0].signbit())


@pytest.mark.parametrize("name", WIRE_FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_in_its_block(name: str, value: float) -> None:
    values = torch.ones(64)
    values[20] = value
    got = _arrived(values, 1, WireFormat(name, 16))  # type: ignore[arg-type]
    assert not got[20].isfinite()
    assert torch.equal(got[:16], values[:16])
    assert torch.equal(got[32:], values[32:])
    if name == "bfloat16":
        assert torch.equal(got[20], values[20]) or values[20].isnan()
    else:
        assert got[16:32].isnan().all()


def test_rounding_at_random_has_the_right_mean() -> None:
    wire = WireFormat("int8", 8, is_stochastic=True)
    values = torch.tensor([1.0, 0.1234, -0.4321, 0.5, 0.003, -0.9999, 0.0, 0.25])
    got = torch.stack([_arrived(values, 1, wire) for _ in range(4000)])
    step = 1 / 127
    assert ((got - values).abs() <= step * 1.001).all()
    assert (got[:, 1] != got[0, 1]).any()
    assert ((got.mean(0) - values).abs() <= 4 * step / 4000**0.5).all()


@pytest.mark.parametrize("name", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_of_what_arrived(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    wire = WireFormat(name, 64)  # type: ignore[arg-type]
    values = [torch.randn(300) for _ in range(3)]
    messages = [wire_codec.encode(value, 1, wire) for value in values]
    output = torch.empty(300, dtype=dtype)
    wire_codec.decode_sum(output, messages, wire, 3)
    expected = sum(_arrived(value, 1, wire) for value in values) / 3
    assert torch.allclose(output.float(), expected, rtol=2**-8 if dtype != torch.float32 else 1e-6)  # type: ignore[arg-type]


def test_bytes() -> None:
    assert WireFormat("bfloat16").num_bytes(1 << 20) == 2 << 20
    assert WireFormat("int8").num_bytes(1 << 20) == (1 << 20) + 4 * (4096 + 1) + 4  # aligned
    for name in WIRE_FORMATS:
        wire = WireFormat(name, 64, name == "int8")  # type: ignore[arg-type]
        assert WireFormat.decode(wire.encode()) == wire
