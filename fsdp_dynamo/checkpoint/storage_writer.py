"""torch.distributed.checkpoint's writer, with checksums of what it writes, and names in errors."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_dynamo.checkpoint.manifest import Sum
from fsdp_dynamo.checkpoint.storage_reader import SavePlanner
from fsdp_dynamo.checkpoint.throttle import Pace
from fsdp_dynamo.errors import CheckpointError, FSDPError


class _Summed:
    """A file that sums up the bytes that are written to it."""

    def __init__(self, stream: Any, pace: Pace) -> None:
        self._stream, self._pace = stream, pace
        self.size = self.crc32 = 0
        self.flush, self.close = stream.flush, stream.close

    def fileno(self) -> int:
        """For fsync, which torch calls before the last bytes have left this process."""
        self._stream.flush()
        number: int = self._stream.fileno()
        return number

    def write(self, content: Any) -> int:
        """Write and sum up."""
        view = memoryview(content).cast("B")
        for piece in self._pace.pieces(view):
            self._stream.write(piece)
            self.crc32 = zlib.crc32(piece, self.crc32)
            self.size += len(piece)
        return len(view)

    def tell(self) -> int:
        """Bytes so far: files are written from begin to end."""
        return self.size


class _SummingFiles(FileSystem):
    """Files by path; those that were written have their sums in ``sums`` afterwards."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.sums: dict[str, Sum] = {}
        self.current: Path | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        self.current = Path(path)
        with super().create_stream(path, mode) as stream:
            summed = _Summed(stream, self.pace)
            yield summed
        self.sums[self.current.name] = Sum(summed.size, summed.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.sums:
            self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes this rank's files below ``path``; afterwards ``sums`` has them all."""

    def __init__(self, path: Path, pace: Pace) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # else it asks for this thread's device
        self.fs: _SummingFiles = _SummingFiles(pace)

    @property
    def sums(self) -> dict[str, Sum]:
        """Of the files that this rank has written, by name."""
        return self.fs.sums

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self._named(planner, lambda: super(Writer, self).write_data(plan, planner))

    def finish(self, metadata: Metadata, results: Any) -> None:
        self._named(None, lambda: super(Writer, self).finish(metadata, results))

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write one more file, to the disk."""

        def write() -> None:
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                stream.write(content)
                os.fsync(stream.fileno())

        self._named(None, write)

    def _named(self, planner: SavePlanner | None, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except FSDPError:
            raise
        except (OSError, RuntimeError) as error:
            entry = f", while it got '{planner.current}'" if planner and planner.current else ""
            raise CheckpointError(
                expected="to write all of it",
                got=str(error).split("\n")[0],
                where=f"file '{self.fs.current or self.path}'{entry}",
                fix="Older checkpoints are as they were. Make room, or save elsewhere.",
            ) from error
