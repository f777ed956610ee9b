"""torch.distributed.checkpoint's writer, with checksums and with file names in errors."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_dynamo.checkpoint.manifest import FileChecksum
from fsdp_dynamo.checkpoint.storage_reader import SavePlanner
from fsdp_dynamo.checkpoint.throttle import Throttle
from fsdp_dynamo.errors import CheckpointError, FSDPError


class _ChecksummingFile:
    """A file with a running checksum of the bytes written to it."""

    def __init__(self, stream: Any, throttle: Throttle) -> None:
        self._stream, self._throttle = stream, throttle
        self.size = self.crc32 = 0
        self.flush, self.close = stream.flush, stream.close

    def fileno(self) -> int:
        """For fsync, which torch calls while bytes are still in this process's buffer."""
        self._stream.flush()
        number: int = self._stream.fileno()
        return number

    def write(self, content: Any) -> int:
        """Write, and update the checksum."""
        view = memoryview(content).cast("B")
        for chunk in self._throttle.chunks(view):
            self._stream.write(chunk)
            self.crc32 = zlib.crc32(chunk, self.crc32)
            self.size += len(chunk)
        return len(view)

    def tell(self) -> int:
        """Bytes so far: files are written sequentially."""
        return self.size


class _ChecksummingFileSystem(FileSystem):
    """File access that collects the checksums of written files in ``checksums``."""

    def __init__(self, throttle: Throttle) -> None:
        self.throttle = throttle
        self.checksums: dict[str, FileChecksum] = {}
        self.current: Path | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        self.current = Path(path)
        with super().create_stream(path, mode) as stream:
            file = _ChecksummingFile(stream, self.throttle)
            yield file
        self.checksums[self.current.name] = FileChecksum(file.size, file.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.checksums:
            self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes this rank's files to ``path`` and collects their checksums."""

    def __init__(self, path: Path, throttle: Throttle) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # otherwise it needs this thread's device
        self.fs: _ChecksummingFileSystem = _ChecksummingFileSystem(throttle)

    @property
    def checksums(self) -> dict[str, FileChecksum]:
        """Checksums of the files that this rank has written, by name."""
        return self.fs.checksums

    def write_data(self, plan: Any, planner: Any) -> Any:
        write = super().write_data
        return self._with_path_in_errors(planner, lambda: write(plan, planner))

    def finish(self, metadata: Metadata, results: Any) -> None:
        finish = super().finish
        self._with_path_in_errors(None, lambda: finish(metadata, results))

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write one more file, and flush it to disk."""

        def write() -> None:
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                stream.write(content)
                os.fsync(stream.fileno())

        self._with_path_in_errors(None, write)

    def _with_path_in_errors(self, planner: SavePlanner | None, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except FSDPError:
            raise
        except (OSError, RuntimeError) as error:
            entry = f", while writing '{planner.current}'" if planner and planner.current else ""
            raise CheckpointError(
                expected="to write the whole file",
                got=str(error).split("\n")[0],
                where=f"file '{self.fs.current or self.path}'{entry}",
                fix="Older checkpoints are unchanged. Make room, or save elsewhere.",
            ) from error
