"""Run a program that was written for torch's FSDP: ``python -m fsdp_dynamo.run PROGRAM ...``.

``PROGRAM`` is a file, or a module as after ``python -m``; what follows are its arguments. Before it
starts, the names of ``torch.distributed.fsdp`` and ``torch.distributed._composable.fsdp`` that
this package has, too, become this package's. Put it last, where a launcher starts processes::

    torchrun --nproc-per-node 2 -m fsdp_dynamo.run train.py --steps 10
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import fsdp_dynamo
from fsdp_dynamo.errors import FSDPError, FSDPStateError, FSDPValueError

_TORCHS = {
    "torch.distributed.fsdp": "fsdp_dynamo",
    "torch.distributed.fsdp.api": "fsdp_dynamo.api",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "fsdp_dynamo.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler": "fsdp_dynamo.sharded_grad_scaler",
    "torch.distributed.fsdp.wrap": "fsdp_dynamo.wrap",
    "torch.distributed.fsdp._fully_shard": "fsdp_dynamo",
    "torch.distributed._composable.fsdp": "fsdp_dynamo",
    "torch.distributed._composable.fsdp.fully_shard": "fsdp_dynamo",
}
"""Torch's modules, each with the module of this package that has its names."""

_PROGRAM = "FSDP_DYNAMO_PROGRAM"
"""Environment variable from which processes that the program spawns know it."""


def replace_torchs_names() -> None:
    """Let torch's modules of FSDP have this package's classes and functions.

    Names that this package lacks stay torch's; the migration page lists them.

    Raises:
        FSDPStateError: a module other than torch's has imported one of the names already, and
            would go on with torch's; nothing is changed.
    """
    replaced: list[tuple[Any, str, Any]] = []
    for theirs, ours in ((import_module(one), import_module(_TORCHS[one])) for one in _TORCHS):
        for name, value in vars(theirs).items():
            own = getattr(ours, name, value)
            is_public = not name.startswith("_") and hasattr(value, "__module__")
            if is_public and own is not value and hasattr(own, "__module__"):
                replaced.append((theirs, name, own))
    _refuse_users({id(getattr(theirs, name)): name for theirs, name, _ in replaced})
    for theirs, name, own in replaced:
        setattr(theirs, name, own)


def _refuse_users(names: Mapping[int, str]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("torch", "fsdp_dynamo"):
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            if id(value) in names:
                raise FSDPStateError(
                    f"fsdp_dynamo.run: expected to start before any program imports torch's FSDP, "
                    f"got the module '{module_name}', which has torch's {names[id(value)]}. Start "
                    "the program itself by python -m fsdp_dynamo.run PROGRAM."
                )


def _code_of(program: str) -> tuple[CodeType, dict[str, object]]:
    """Return the code of a file (an absolute path) or module, and attributes for the module."""
    if Path(program).is_file():
        with io.open_code(program) as file:
            code = compile(file.read(), program, "exec", dont_inherit=True)
        return code, {"__file__": program, "__package__": ""}
    with suppress(ImportError, ValueError):  # no parent package, or no name of a module
        spec = find_spec(program)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{program}.__main__")
        if spec is not None and isinstance(spec.loader, InspectLoader):
            found = spec.loader.get_code(spec.name)
            if found is not None:
                return found, {"__file__": spec.origin, "__package__": spec.parent}
    raise FSDPValueError(
        f"fsdp_dynamo.run: expected the path of a program or the name of a module, got "
        f"{program!r}. Use it in place of python: python -m fsdp_dynamo.run PROGRAM ..., or "
        "torchrun ... -m fsdp_dynamo.run PROGRAM ..."
    )


def _start(namespace: dict[str, Any]) -> None:
    """Run the program in the namespace of this module, which is the main one.

    The module stays ``fsdp_dynamo.run`` for ``multiprocessing``: processes that it spawns import
    the main module, and so come here, too.
    """
    is_spawned = namespace["__name__"] != "__main__"
    try:
        if not is_spawned:
            if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
                print(namespace["__doc__"])
                raise SystemExit(0 if len(sys.argv) > 1 else 2)
            del sys.argv[0]
            os.environ[_PROGRAM] = sys.argv[0]
            path = Path(sys.argv[0]).absolute()
            if path.is_file():
                os.environ[_PROGRAM], sys.path[0] = str(path), str(path.parent)
        replace_torchs_names()
        code, attributes = _code_of(os.environ[_PROGRAM])
    except FSDPError as error:
        raise SystemExit(str(error)) from None
    if not is_spawned and os.environ.get("RANK", "0") == "0":
        version = fsdp_dynamo.__version__
        print(
            f"{sys.argv[0]} runs on fsdp_dynamo {version} in place of torch's FSDP", file=sys.stderr
        )
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace.update(attributes, __doc__=None)
    exec(code, namespace)


if __name__ in ("__main__", "__mp_main__"):
    _start(globals())
