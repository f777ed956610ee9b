"""Compile the Triton kernels of wire formats for a GPU that need not be there, and inspect them.

``python tools/triton_kernels.py`` needs Triton, whose wheel brings ``ptxas`` and ``cuobjdump``. It
prints for each kernel, format and dtype: registers of a thread, bytes of its stack (spilled
registers), and instructions that load or store 16 bytes and fewer in the loop over whole blocks and
in the code for the last, smaller block.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1]))

from fsdp_dynamo.comm import wire_triton
from graph_passes.wire_format import WIRE_FORMATS, WireFormat

H100 = GPUTarget("cuda", 90, 32)
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Compiled:
    """A kernel for one format and dtype.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread; more than 0 where registers spill.
        widths: number of loads and stores of global memory by bytes, such as ``{"LDG 16": 4}``.
    """

    kernel: str
    wire: str
    dtype: str
    registers: int
    stack_bytes: int
    widths: dict[str, int]


class _Recorded:
    """Stands in for a kernel: compiles what would be launched."""

    def __init__(self, kernel: Any, found: list[tuple[Any, dict[str, Any], dict[str, Any]]]):
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid: object) -> Any:
        def launch(*given: Any, **constants: Any) -> None:
            options = {name: constants.pop(name) for name in wire_triton.OPTIONS}
            values = dict(zip(self._kernel.arg_names, given, strict=False))
            self._found.append((self._kernel, values, {"constants": constants, **options}))

        return launch


def _launches(wire: WireFormat, dtype: torch.dtype) -> list[tuple[Any, dict[str, Any], Any]]:
    """Arguments of each kernel as the library would launch it for two ranks."""
    numel = 64 * 1000 + 16
    parts = torch.zeros(2, numel, dtype=dtype)
    messages = torch.zeros(2, wire.num_bytes(numel), dtype=torch.uint8)
    found: list[tuple[Any, dict[str, Any], Any]] = []
    names = ("_encode", "_decode", "_add")
    kernels = {name: getattr(wire_triton, name) for name in names}
    try:
        for name, kernel in kernels.items():
            setattr(wire_triton, name, _Recorded(kernel, found))
        wire_triton.encode(parts, messages, wire, may_lack=True, own=0)
        wire_triton.decode(parts, messages, wire)
        wire_triton.add(parts[0], parts[1], messages, wire, 2.0, 0)
    finally:
        for name, kernel in kernels.items():
            setattr(wire_triton, name, kernel)
    return found


def compiled(target: GPUTarget = H100) -> Iterator[Compiled]:
    """Compile every kernel for every format, and for tensors in fp32 and bf16."""
    for name in WIRE_FORMATS:
        wire = WireFormat(name, is_stochastic=name.startswith("int"))  # type: ignore[arg-type]
        for dtype in (torch.float32, torch.bfloat16):
            for kernel, values, options in _launches(wire, dtype):
                binary = _binary(kernel, values, options, target)
                label = str(dtype).removeprefix("torch.")
                yield Compiled(kernel.fn.__name__, name, label, *_inspected(binary))


def _binary(kernel: Any, values: dict[str, Any], options: Any, target: GPUTarget) -> bytes:
    constants = options.pop("constants")
    signature = dict.fromkeys(constants, "constexpr")
    attributes = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            # Messages begin at multiples of 16 bytes, and so do shards (``ALIGN_BYTES``).
            attributes[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    ordered = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, ordered, constants, attributes)
    binary: bytes = triton.compile(source, target=target, options=options).asm["cubin"]
    return binary


def _inspected(binary: bytes) -> tuple[int, int, dict[str, int]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage, code = (
            subprocess.run(
                [_BIN / "cuobjdump", option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))  # type: ignore[index]
    widths: dict[str, int] = {}
    for kind, rest in re.findall(r"\b(LDG|STG|LDL|STL)((?:\.\w+)*)", code):
        bits = re.search(r"\.(128|64|U16|U8|S8)\b", rest)
        num_bytes = {"128": 16, "64": 8, "U16": 2, "U8": 1, "S8": 1}.get(bits[1] if bits else "", 4)
        key = f"{kind} {num_bytes}"
        widths[key] = widths.get(key, 0) + 1
    return registers, stack, widths


if __name__ == "__main__":
    for one in compiled():
        widths = ", ".join(f"{count} x {key}" for key, count in sorted(one.widths.items()))
        print(
            f"{one.kernel:8} {one.wire:9} {one.dtype:9} registers {one.registers:3} "
            f"stack {one.stack_bytes:2}   {widths}"
        )
