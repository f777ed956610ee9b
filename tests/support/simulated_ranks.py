"""Thousands of ranks as threads over one store that counts what goes through it.

Only what goes through the store is simulated: there are no processes, and no collectives.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist

from fsdp_dynamo.health import comparison, late_ranks, store

T = TypeVar("T")
_STACK_BYTES = 1 << 18
_LIMIT_S = 120.0
_POLL_S = (0.05, 2.0)  # thousands of threads share an interpreter
_current = threading.local()


@dataclass
class Traffic:
    """What has gone through a store.

    Attributes:
        operations: how many, repeated ones of ranks that wait included.
        num_bytes: of keys and values in both directions, without those of ``check``.
        keys: that each rank has looked at or written.
    """

    operations: int = 0
    num_bytes: int = 0
    keys: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def looked_at(self) -> int:
        """Different keys that each rank has looked at or written, summed over ranks."""
        return sum(map(len, self.keys.values()))

    @property
    def longest_key(self) -> int:
        """Characters of the longest key."""
        return max(len(key) for keys in self.keys.values() for key in keys)


class CountingStore:
    """A store in this process, with the methods that the package uses."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def _count(self, key: str, *values: bytes) -> None:
        self.traffic.operations += 1
        self.traffic.keys[_current.rank].add(key)
        if values:
            self.traffic.num_bytes += len(key) + sum(map(len, values))

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value.encode()
            self._count(key, self._values[key])

    def get(self, key: str) -> bytes:
        with self._lock:  # the package asks for keys that are there
            self._count(key, self._values[key])
            return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            for key in keys:
                self._count(key)
            return all(key in self._values for key in keys)

    def add(self, key: str, number: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + number
            self._values[key] = str(total).encode()
            self._count(key, self._values[key])
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            value = self._values.setdefault(key, desired.encode()) if not expected else b""
            assert value, "only for keys that are not there yet"
            self._count(key, value)
            return value


class _Prefixed:
    """As torch's ``PrefixStore``."""

    def __init__(self, prefix: str, of: CountingStore) -> None:
        self._prefix, self._of = prefix, of

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._of, name)

        def call(key: str | list[str], *args: Any) -> Any:
            keys = [f"{self._prefix}/{one}" for one in ([key] if isinstance(key, str) else key)]
            return method(keys if name == "check" else keys[0], *args)

        return call


class _Group:
    """The group of all ranks, as one of them has it."""

    def __init__(self, rank: int, ranks: Sequence[int], meeting: threading.Barrier) -> None:
        self._rank, self.ranks, self.meeting = rank, ranks, meeting

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.ranks)


class _Groups:
    @property
    def WORLD(self) -> _Group:  # noqa: N802
        group: _Group = _current.group
        return group


@contextmanager
def _one_process(shared: CountingStore, timeout_s: float) -> Iterator[None]:
    """What the package asks torch.distributed, answered for the rank of the thread that asks."""
    with ExitStack() as patches:
        for target, name, value in (
            (dist, "get_rank", lambda *_: _current.rank),
            (dist, "get_process_group_ranks", lambda group: group.ranks),
            (dist, "is_initialized", lambda: True),
            (dist, "group", _Groups()),
            (store, "default_store", lambda: shared),
            (late_ranks, "default_store", lambda: shared),
            (store, "PrefixStore", _Prefixed),
            (late_ranks, "group_timeout_s", lambda _: _LIMIT_S),
            (late_ranks, "gone_ranks", lambda *_: []),
            (comparison, "_timeout_s", timeout_s),
            (comparison, "_POLL_S", _POLL_S),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        yield


def simulate(
    size: int, job: Callable[[Any], T], timeout_s: float = _LIMIT_S
) -> tuple[list[T | Exception], Traffic]:
    """Run ``job(group)`` on each of so many ranks at the same time.

    All of them meet at ``group.meeting.wait()``. ``timeout_s`` is for ``set_agreement_timeout``;
    thousands of threads are slow.

    Returns:
        What each returned or raised, and what went through their store.
    """
    shared, ranks = CountingStore(), range(size)
    meeting = threading.Barrier(size, timeout=_LIMIT_S)

    def run(rank: int) -> T | Exception:
        _current.rank, _current.group = rank, _Group(rank, ranks, meeting)
        try:
            return job(_current.group)
        except Exception as error:
            return error

    before = threading.stack_size(_STACK_BYTES)
    try:
        with _one_process(shared, timeout_s), ThreadPoolExecutor(size) as pool:
            found = list(pool.map(run, ranks))
    finally:
        threading.stack_size(before)
    return found, shared.traffic
