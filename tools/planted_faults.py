"""Mutation check: plant one fault at a time in a copy of the library, and run its tests.

The faults are in ``fault_table.py``, one or two for each mechanism. Run this before and after a
change to the tests: a fault that was caught before must be caught after::

    python tools/planted_faults.py [--only NAME] [--list] [--json FILE] [--lock FILE]

A place is found by the name of its function and by a fragment of code in it, or else by a fragment
that occurs once; compared as syntax trees, so that comments, formatting and the file do not matter.
A fault is

- *caught*: a test fails that passes without the fault;
- *survived*: its tests pass, and so do their folders (as far as ``--limit`` seconds lead);
- *unreliable*: the test that fails also fails without the fault;
- *not found*: the code has changed, and the table must follow.

The exit code is 1 unless all faults are caught. With ``--lock`` each fault waits until it can lock
one of these files (``flock``), and as many faults run at once as there are files.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from fault_table import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)


@dataclass
class Result:
    """What came out for one fault; ``found`` is the test that fails, or why there is none."""

    name: str
    status: str
    place: str = ""
    found: str = ""
    seconds: float = 0.0


Place = tuple[Path, int, int, int]  # a file, first byte, end, and indentation of code in it


def find(root: Path, fault: Fault) -> Place:
    """The code below ``root`` that a fault changes.

    Raises:
        LookupError: it is not there, or is there several times.
    """
    packages = [root / "fsdp_dynamo", root / "graph_passes"]
    paths = sorted(path for package in packages for path in package.rglob("*.py"))
    found = [place for path in paths for place in _places(path, fault, fault.function)]
    found = found or [place for path in paths for place in _places(path, fault, "")]
    if len(found) != 1:
        raise LookupError(
            f"fault '{fault.name}': expected one place in {fault.function}() that reads "
            f"{fault.fragment!r}, got {[str(path) for path, *_ in found]}. Bring "
            "tools/fault_table.py up to date."
        )
    return found[0]


def planted(place: Place, fault: Fault) -> bytes:
    """The content of the file with the fault in its place."""
    path, begin, end, column = place
    code = textwrap.dedent(fault.replacement).strip()
    code = f"({code})" if isinstance(_parsed(fault.fragment)[0], ast.expr) else code
    source, code = path.read_bytes(), code.replace("\n", "\n" + " " * column)
    changed = source[:begin] + code.encode() + source[end:]
    ast.parse(changed)
    return changed


def _parsed(fragment: str) -> list[ast.AST]:
    """A fragment's statements, or its one expression."""
    body = ast.parse(textwrap.dedent(fragment).strip()).body
    return [body[0].value] if len(body) == 1 and isinstance(body[0], ast.Expr) else body


def _places(path: Path, fault: Fault, function: str) -> set[Place]:
    source, found = path.read_bytes(), set()
    if function.rpartition(".")[2].encode() not in source:
        return found
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    for definition in _definitions(ast.parse(source), function):
        for nodes in _matches(definition, _parsed(fault.fragment)):
            begin = starts[nodes[0].lineno - 1] + nodes[0].col_offset
            end = starts[nodes[-1].end_lineno - 1] + nodes[-1].end_col_offset
            found.add((path, begin, end, nodes[0].col_offset))
    return found


def _definitions(tree: ast.AST, function: str, outer: str = "") -> Iterator[ast.AST]:
    """Definitions of this name, which may begin with those of classes; all, if it is empty."""
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{outer}.{node.name}"
            if not function or name.endswith(f".{function}"):
                yield node
        yield from _definitions(node, function, name)


def _matches(definition: ast.AST, fragment: list[ast.AST]) -> Iterator[list[ast.AST]]:
    """The nodes of a definition, side by side, that are those of a fragment."""
    wanted = [_form(node) for node in fragment]
    fields = [value for node in ast.walk(definition) for _, value in ast.iter_fields(node)]
    blocks = [value for value in fields if isinstance(value, list)]
    blocks += [[value] for value in fields if isinstance(value, ast.expr)]
    for block in blocks:
        nodes = [node for node in block if isinstance(node, ast.AST)]
        for found in (nodes[begin : begin + len(wanted)] for begin in range(len(nodes))):
            if [_form(node) for node in found] == wanted:
                yield found


def _form(node: ast.AST) -> str:
    return re.sub(r", ctx=(Load|Store|Del)\(\)", "", ast.dump(node))


def check(fault: Fault, limit_s: float) -> Result:
    """Plant a fault in a copy, and run its tests there; then their folders, if these pass."""
    result = Result(fault.name, "survived")
    with _copy() as folder:
        try:
            place = find(folder, fault)
        except LookupError as error:
            return Result(fault.name, "not found", found=str(error))
        path, original = place[0], place[0].read_bytes()
        result.place = f"{path.relative_to(folder).with_suffix('')} {fault.function}()"
        path.write_bytes(planted(place, fault))
        folders = sorted({str(Path(test).parent) for test in fault.tests})
        for tests in (fault.tests, folders):
            tests = [test for test in tests if (folder / test).exists()]
            code, failed = _run(folder, tests, limit_s) if tests else (0, "")
            if code is None:
                result.found = f"{' '.join(tests)} took more than {limit_s:g} s"
            elif code not in (0, 5):  # 5: no test was selected
                path.write_bytes(original)
                again, _ = _run(folder, [failed] if failed else tests, limit_s)
                result.status = "caught" if again == 0 else "unreliable"
                result.found = failed or f"pytest, exit code {code}"
                break
    return result


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of the working tree, with a folder for temporary files; both are gone afterwards."""
    # Below /tmp, as the addresses of the tests' sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="fault-", dir="/tmp"))
    command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, text=True).split("\0")
    try:
        for name in filter(lambda name: (ROOT / name).is_file(), names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        (folder / "tmp").mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code of pytest (``None``: it took too long), and the first test that failed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(folder / "tmp")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # code with a fault stays in no cache
    given = {"cwd": folder, "env": environment, "start_new_session": True, "text": True}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", *tests]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **given)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with ranks that are left
        process.wait()
    failed = _FAILED.search(output)
    return process.returncode, failed[1] if failed else ""


def _checked(fault: Fault, locks: Sequence[Path], limit_s: float) -> Result:
    """Check a fault when one of the locks is free, and print what came out."""
    with _slot(locks):
        began = time.monotonic()
        result = check(fault, limit_s)
        result.seconds = round(time.monotonic() - began, 1)
    print(result.status, f"{result.seconds} s", result.name, result.found, sep="  ", flush=True)
    return result


def _slot(locks: Sequence[Path]) -> AbstractContextManager[object]:
    """Wait for the lock of one of some files, which is held until the file is closed."""
    while locks:
        time.sleep(1)  # those who wait already come first
        for path in locks:
            file = path.open("a")
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            file.close()
    return nullcontext()


def main() -> int:
    """Check the faults that the command line names; 0 if all are caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", default=[])
    parser.add_argument("--list", action="store_true", help="show the faults and their places")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--lock", action="append", type=Path, default=[], help="see above")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a run of pytest")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.name in (given.only or names)]
    if given.list:
        for fault in faults:
            print(f"{fault.name}: {fault.effect}\n    {find(ROOT, fault)[0]}, {fault.function}()")
        return 0
    results: list[Result] = []
    with ThreadPoolExecutor(max(1, len(given.lock))) as pool:
        for result in pool.map(lambda fault: _checked(fault, given.lock, given.limit), faults):
            results.append(result)
            if given.json is not None:
                given.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return int(any(result.status != "caught" for result in results))


if __name__ == "__main__":
    sys.exit(main())
