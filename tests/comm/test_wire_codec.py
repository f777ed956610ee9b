"""Messages in fewer bits: what arrives, how far off it may be, and what no code can say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from fsdp_dynamo.comm import wire_codec, wire_kernels
from graph_passes.markers import NO_VALUE
from graph_passes.wire_format import WIRE_FORMATS, WireFormat

LARGEST_ERROR = {"bfloat16": 2**-8, "float8": 2**-4, "int8": 1 / 254, "int4": 1 / 14}
"""Of an element, as a part of the largest one in its block."""


def _arrived(values: torch.Tensor, num_parts: int, wire: WireFormat) -> torch.Tensor:
    """All parts, as another rank reads them."""
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
        patch.setattr(wire_kernels, "tile_numel", lambda _: tile)
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


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_at_random_has_the_right_mean(name: str) -> None:
    wire = WireFormat(name, 8, is_stochastic=True)  # type: ignore[arg-type]
    values = torch.tensor([1.0, 0.1234, -0.4321, 0.5, 0.003, -0.9999, 0.0, 0.25])
    got = torch.stack([_arrived(values, 1, wire) for _ in range(1000)])
    step = 2 * LARGEST_ERROR[name]
    assert ((got - values).abs() <= step * 1.001).all()
    assert (got[:, 1] != got[0, 1]).any()
    assert ((got.mean(0) - values).abs() <= 4 * step / 1000**0.5).all()
    values = torch.full((800,), 0.3)
    values[::8] = 1.0
    rounded = _arrived(values, 1, wire).view(100, 8)[:, 1:] > 0.3
    assert (rounded != rounded[0]).any(0).all()  # the noise of each block is another


@given(
    name=st.sampled_from(WIRE_FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_messages=st.integers(1, 6),
    numel=st.integers(1, 300),
    tile=st.sampled_from([16, 200, 1 << 18]),
    one_by_one=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sums_are_of_what_arrived(
    name: str,
    dtype: torch.dtype,
    num_messages: int,
    numel: int,
    tile: int,
    one_by_one: bool,
    seed: int,
) -> None:
    """One message or several at once; what is missing in all of them stays so."""
    torch.manual_seed(seed)
    wire = WireFormat(name, 16)  # type: ignore[arg-type]
    values = torch.randn(num_messages, numel).masked_fill(torch.rand(numel) < 0.3, NO_VALUE)
    values[0, :: max(1, numel // 3)] = NO_VALUE  # of some elements, in one message only
    own = torch.randn(numel).masked_fill(torch.rand(numel) < 0.5, NO_VALUE).to(dtype)
    arrived = torch.stack([_arrived(value, 1, wire) for value in values])
    expected = (own.float() + arrived.sum(0)) / 3
    is_missing = (torch.vstack([own.float(), arrived]) == 0).all(0)
    is_missing &= torch.vstack([own.float(), arrived]).signbit().all(0)
    messages = wire_codec.encode(values.view(-1), num_messages, wire, may_lack=True)
    messages = messages.view(num_messages, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_kernels, "tile_numel", lambda _: tile)
        given = list(messages) if one_by_one else messages
        if not one_by_one:
            given = torch.cat([messages[:1], torch.full_like(messages[:1], 255), messages[1:]])
        wire_codec.add_decoded(own, own, given, wire, 3, num_messages if one_by_one else 1)
    one = 2**-8 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(own.float(), expected, rtol=one, atol=max(1e-5, one**2))
    assert torch.equal((own == 0) & own.signbit(), is_missing)


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_what_is_not_sent_is_not_encoded(name: str) -> None:
    wire = WireFormat(name, 16)  # type: ignore[arg-type]
    values = torch.randn(3 * 64)
    every = wire_codec.encode(values, 3, wire).view(3, -1)
    values[64:128] = torch.nan
    sent = wire_codec.encode(values, 3, wire, own=1).view(3, -1)
    assert torch.equal(sent[0], every[0])
    assert torch.equal(sent[2], every[2])


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Of compiled kernels, which run as they are."""
    torch._dynamo.reset()
    monkeypatch.setattr(wire_kernels, "_compiled", {})
    monkeypatch.setattr(wire_kernels, "tile_numel", lambda device: 1 << 16)
    counter = CompileCounter()
    wire_kernels.compile_kernels(counter)
    yield counter
    torch._dynamo.reset()


def test_one_code_for_all_sizes(backend: CompileCounter) -> None:
    """Of each kernel one for tiles of one row, and for more one if they are contiguous and one if
    not; of sums, which have one row, one with a divisor and one without."""
    nearest, at_random = WireFormat("int8"), WireFormat("int8", is_stochastic=True)
    for num_parts in (1, 2, 5):
        for numel in (4096, 17_000, 1 << 16, 200_000):
            values = torch.randn(num_parts * numel)
            sent = wire_codec.encode(values, num_parts, nearest)
            wire_codec.decode(values, sent, num_parts, nearest)
            sent = wire_codec.encode(values, num_parts, at_random)
            parts = list(sent.chunk(num_parts))
            own = values[:numel].clone()
            wire_codec.add_decoded(own, own, parts, at_random, float(num_parts), num_parts)
    assert backend.frame_count == 3 * len(("encode", "encode with noise", "decode")) + 2


def test_more_codes_than_dynamo_keeps(backend: CompileCounter) -> None:
    """A kernel that has met too many formats runs as it is."""
    torch.manual_seed(1)
    values = torch.randn(1 << 15)
    for block_numel in range(16, 32):
        wire = WireFormat("int8", block_numel)
        got = _arrived(values, 1, wire)
        allowed = LARGEST_ERROR["int8"] * _bounds(values, 1, block_numel)
        assert ((got - values).abs() <= 1.01 * allowed).all()
    assert 2 < backend.frame_count < 2 * 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int8", torch.float32), ("float8", torch.bfloat16), ("int4", torch.float32)],
)
def test_compiled_kernels(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled or not: the same bytes decode to the same bits; codes differ by one at most."""
    torch.manual_seed(1)
    values = torch.randn(2 * 40_000).to(dtype)
    nearest, at_random = WireFormat(name), WireFormat(name, is_stochastic=True)  # type: ignore[arg-type]
    plain = wire_codec.encode(values, 2, nearest)
    decoded = torch.empty_like(values)
    wire_codec.decode(decoded, plain, 2, nearest)
    monkeypatch.setattr(wire_kernels, "_compiled", {})
    wire_kernels.compile_kernels("inductor")
    again = torch.empty_like(values)
    wire_codec.decode(again, plain, 2, nearest)
    assert torch.equal(again, decoded)
    for wire, steps in ((nearest, 0.51), (at_random, 1.01)):
        wire_codec.decode(again, wire_codec.encode(values, 2, wire), 2, wire)
        allowed = 2 * steps * LARGEST_ERROR[name] + (2**-8 if dtype is torch.bfloat16 else 0)
        assert ((again - values).abs() <= allowed * _bounds(values, 2, 256)).all()
    total = values[:40_000].clone()
    wire_codec.add_decoded(total, total, plain.view(2, -1), nearest, 2.0, 0)
    expected = (values[:40_000].float() + decoded[40_000:].float()) / 2
    allowed = 2**-7 if dtype is torch.bfloat16 else 1e-6
    assert torch.allclose(total.float(), expected, rtol=2**-7, atol=allowed)
    total = values[:40_000].clone()
    wire_codec.add_decoded(total, total, plain.view(2, -1), nearest, 2.0, 2)
    expected += decoded[:40_000].float() / 2
    assert torch.allclose(total.float(), expected, rtol=2**-7, atol=2 * allowed)


def test_bytes() -> None:
    assert WireFormat("bfloat16").num_bytes(1 << 20) == 2 << 20
    assert WireFormat("int8").num_bytes(1 << 20) == (1 << 20) + 4 * (4 + 16384)
    assert WireFormat("int4").num_bytes(1 << 20) == (1 << 19) + 4 * (4 + 16384)
    assert WireFormat("int4").num_bytes(3) == 32 + 16  # a scale and two bytes, aligned
    for name in WIRE_FORMATS:
        wire = WireFormat(name, 64, name in ("int8", "int4"))  # type: ignore[arg-type]
        assert WireFormat.decode(wire.encode()) == wire
