"""C++ kernels of several graphs in one library, which each of them is loaded from by its own name.

A compiler reads the same headers for each file: with Inductor's, 0.6 s before the first line of a
kernel, and 0.1 s for what follows. Inductor compiles a file for each kernel. Here one file holds
many, and the library is found under the name of each kernel's own, in a cache too, by Inductor as
it is.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.runtime.cache_dir_utils import cache_dir

_ENTRY = "kernel"
"""Name of the function of each source, and of the extension module that it makes."""

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)

# Python asks a library for the function PyInit_kernel, whichever of its kernels is wanted. The name
# of the module, which begins with the kernel's key, is in the spec.
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
        builders: Inductor's, one for each kernel: of one command line, but for names of files.

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
    """Its command line without the names of its files: kernels of the same can be joined."""
    target = Path(builder.get_target_file_path())
    return builder.get_command_line().replace(str(target.with_suffix("")), "")


def joined_source(sources: Mapping[str, str]) -> str:
    """One source of several: each in a namespace of its own, with a name of its own.

    Args:
        sources: of Inductor's kernels with their bindings, by their keys.
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
    """Make the library found as ``target`` too, unless another process has made that."""
    try:
        os.link(library, target)
    except FileExistsError:
        pass
    except OSError:  # the file system has no hard links
        draft = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(library, draft)
        draft.replace(target)


__all__ = ["build_joined", "command_of", "joined_source"]
