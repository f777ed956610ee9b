"""Inductor in graph mode: settings, and C++ kernels of all stretches built together."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch._functorch.config
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa, list_mode_options
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.runtime.cache_dir_utils import cache_dir

from fsdp_dynamo.dynamo import artifacts
from fsdp_dynamo.dynamo.private_api import Kernel, builds_put_off
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.graph_mode.compile_cache import own_file
from fsdp_dynamo.graph_mode.options import GraphOptions
from fsdp_dynamo.graph_mode.planning import is_recording
from fsdp_dynamo.graph_mode.stretch_compiler import LowerWrites, Partitioner
from graph_passes.pipeline import Pipeline

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


def mode_settings(mode: str | None, *known: str) -> dict[str, Any]:
    """Return Inductor's settings for ``torch.compile(mode=...)``.

    Raises:
        FSDPValueError: the backend does not know this mode.
    """
    if mode is None:
        return {}
    if mode not in known:
        if mode == MAX_AUTOTUNE:
            reason = 'nothing is compiled by Inductor; take backend="fsdp_dynamo"'
        else:
            reason = "CUDA graphs come with options={'cuda_graphs': True}"
        raise FSDPValueError(
            f"torch.compile(mode=...): expected {' or '.join(map(repr, ('default', *known)))}, got "
            f"{mode!r}. Leave mode out: {reason}."
        )
    return dict(list_mode_options(mode))


def users_settings(options: GraphOptions, is_used: bool = True) -> dict[str, Any]:
    """Return the settings of Inductor among the user's options.

    Raises:
        FSDPValueError: the backend decides one of them, or does not use Inductor.
    """
    ours = {"custom_partitioner_fn", "post_grad_custom_post_pass"}
    for name, value in options.inductor.items():
        if not is_used:
            reason = 'nothing is compiled by Inductor; take backend="fsdp_dynamo"'
        elif name == "triton.cudagraphs" and value:
            reason = "options={'cuda_graphs': True} captures collectives, too"
        elif name in ours:
            reason = "the backend has one of its own there"
        else:
            continue
        raise FSDPValueError(
            f"torch.compile(options=...), '{name}': expected settings of Inductor that the backend "
            f"leaves to the user, got {name}={value!r}. Leave it out: {reason}."
        )
    return dict(options.inductor)


def inductor_settings(partitioner: Partitioner, pipeline: Pipeline, marks: str) -> dict[str, Any]:
    """Return settings with our partitioner, and our pass over what Inductor compiles.

    The pass contains the key of the pipeline, since AOTAutograd caches whole programs.
    """
    config: dict[str, Any] = {
        "custom_partitioner_fn": partitioner,
        "post_grad_custom_post_pass": LowerWrites(f"{pipeline.cache_key()}.{marks}"),
    }
    if is_recording() or artifacts.is_recording():
        # Not force_disable_caches: that compiles C++ headers anew as well.
        config |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    return config


def vectorization(example_inputs: Sequence[Any]) -> dict[str, Any]:
    """Return settings with which Inductor probes no instruction set of the CPU but the best.

    By itself Inductor compiles a probe for each set that an x86 CPU has, 2 to 3 s each, and loads
    them in every process. If the best set works, the others do; a file in the compile cache says
    so to later processes. If it does not work, Inductor is left to probe all of them.
    """
    is_asked = inductor_config.cpp.vec_isa_ok is not None
    if sys.platform != "linux" or is_asked or not _all_on_cpu(example_inputs):
        return {}
    flags = set(cpu_vec_isa.x86_isa_checker())  # empty on other processors
    known = (isa for isa in cpu_vec_isa.supported_vec_isa_list if {*str(isa).split()} <= flags)
    best = next(known, None)
    if best is None:
        return {}
    compiler = cpu_vec_isa._get_isa_dry_compile_fingerprint(best.build_arch_flags())
    mark = own_file(".probe", str(best), compiler, torch.__file__)
    if not mark.exists():
        if not best:  # the truth of an instruction set is its probe
            return {}
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return {"cpp.vec_isa_ok": True}


def _all_on_cpu(inputs: Sequence[Any]) -> bool:
    return all(x.device.type == "cpu" for x in inputs if isinstance(x, torch.Tensor))


def keeps_graphs(settings: Mapping[str, Any]) -> bool:
    """Whether graphs compiled with these settings are cached, so that other ranks find them."""
    return bool(
        settings.get("fx_graph_cache", inductor_config.fx_graph_cache)
        and torch._functorch.config.enable_autograd_cache
        and not torch.compiler.config.force_disable_caches
    )


# -- kernel builds ---------------------------------------------------------------------------------
# C++ kernels of all stretches of a graph are built at the end, many in one file.
#
# Inductor starts a compiler for each kernel and waits for the kernels of one graph before it turns
# to the next. Here builds are put off until all stretches are lowered.


_log = logging.getLogger(__name__)

_KERNELS_A_FILE = 24
"""With more kernels there are several files, at most one for each of Inductor's compile threads."""


@contextmanager
def built_together(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Put off the builds of kernels while open; build them at the end.

    Only if all inputs are on CPUs: kernels of other devices are measured, or kept with the graph's
    code, before the next graph.
    """
    if not _all_on_cpu(example_inputs):
        yield
        return
    with builds_put_off() as put_off:
        yield
    for batch in _batches(put_off.kernels):
        AsyncCompile.submit(functools.partial(_build, batch))
    for wait in put_off.waits:
        wait()


def _batches(kernels: Sequence[Kernel]) -> Iterator[Sequence[Kernel]]:
    """Group kernels with equal compiler commands into few files, more if there are many."""
    alike: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        alike.setdefault(command_of(kernel[0]), []).append(kernel)
    for some in alike.values():
        files = min(get_compile_threads(), -(-len(some) // _KERNELS_A_FILE))
        yield from (some[first::files] for first in range(files))


def _build(batch: Sequence[Kernel]) -> None:
    """Build kernels in one file. Inductor builds each kernel that then has no library."""
    try:
        if len(batch) > 1:
            build_joined([builder for builder, _ in batch])
    except (OSError, RuntimeError):
        _log.debug("%d kernels are built one by one", len(batch), exc_info=True)
    finally:
        for _, built in batch:
            built.set_result(None)


# -- joined kernels --------------------------------------------------------------------------------
# C++ kernels of several graphs in one library, which each graph loads under its own name.
#
# A compiler reads the same headers for each file: with Inductor's, 0.6 s before the first line of a
# kernel, and 0.1 s for the kernel. So one file holds many kernels. The library is linked under the
# name of each kernel, where unmodified Inductor finds it, also later in the cache.


_ENTRY = "kernel"
"""Name of the function in each source, and of the extension module."""

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)

# Python calls PyInit_kernel of a library, whichever kernel is wanted. The module's name in the
# spec, which begins with the kernel's key, tells them apart.
_DISPATCH = """\
static const struct { const char* key; PyObject* (*make)(void); } joined_kernels[] = {
%s};

static PyObject* joined_create(PyObject* spec, PyModuleDef*) {
    PyObject* name = PyObject_GetAttrString(spec, "name");
    if (name == nullptr) return nullptr;
    if (const char* text = PyUnicode_AsUTF8(name)) {
        const std::string wanted(text);
        for (const auto& one : joined_kernels) {
            if (wanted.rfind(std::string(one.key) + ".", 0) == 0) {
                Py_DECREF(name);
                return one.make();
            }
        }
        PyErr_Format(PyExc_ImportError, "%%U is not in this library", name);
    }
    Py_DECREF(name);
    return nullptr;
}

static PyModuleDef_Slot joined_slots[] = {
    {Py_mod_create, reinterpret_cast<void*>(&joined_create)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr}};

static struct PyModuleDef joined_module = {
    PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, joined_slots, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_kernel(void) { return PyModuleDef_Init(&joined_module); }
"""


def build_joined(builders: Sequence[CppBuilder]) -> None:
    """Build the libraries of several kernels from one file.

    Args:
        builders: Inductor's builder of each kernel; their commands differ only in file names.

    Raises:
        RuntimeError: the compiler refuses the file; no library was made.
        OSError: a file could not be written.
    """
    targets = [Path(builder.get_target_file_path()) for builder in builders]
    sources = {_key(target): target.with_suffix(".cpp").read_text() for target in targets}
    with TemporaryDirectory(dir=cache_dir()) as folder:
        source = Path(folder) / "joined.cpp"
        source.write_text(joined_source(sources))
        joined = CppBuilder(source.stem, str(source), builders[0]._build_option, folder)
        joined.build()
        for target in targets:
            _link(Path(joined.get_target_file_path()), target)


def command_of(builder: CppBuilder) -> str:
    """Return a compiler command without file names. Kernels with equal ones can be joined."""
    target = Path(builder.get_target_file_path())
    return builder.get_command_line().replace(str(target.with_suffix("")), "")


def joined_source(sources: Mapping[str, str]) -> str:
    """Return one source of several, each in a namespace of its own.

    Args:
        sources: sources of Inductor's kernels with their bindings, by key.
    """
    includes = dict.fromkeys(
        line.strip() for source in sources.values() for line in _INCLUDE.findall(source)
    )
    parts = ["#define PY_SSIZE_T_CLEAN", *includes, "#include <string>"]
    for number, source in enumerate(sources.values()):
        names = {name: f"{name}_{number}" for name in (_ENTRY, f"PyInit_{_ENTRY}")}
        parts += [f"#define {name} {own}" for name, own in names.items()]
        parts += [f"namespace joined_{number} {{", _INCLUDE.sub("", source), "}"]
        parts += [f"#undef {name}" for name in names]
    entries = (
        f'    {{"{key}", joined_{number}::PyInit_{_ENTRY}_{number}}},\n'
        for number, key in enumerate(sources)
    )
    return "\n".join([*parts, _DISPATCH % "".join(entries)])


def _key(target: Path) -> str:
    return target.name.partition(".")[0]


def _link(library: Path, target: Path) -> None:
    """Make the library available as ``target`` too, unless another process has made that file."""
    try:
        os.link(library, target)
    except FileExistsError:
        pass
    except OSError:  # the file system has no hard links
        draft = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(library, draft)
        draft.replace(target)
