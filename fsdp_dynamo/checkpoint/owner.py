"""Whose checkpoint folder it is: two runs that save into one folder would prune each other's.

The first rank writes its run into the folder when it first saves there. A run that was started
again takes the folder over; the run before, if it still lives, finds that out with its next save.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_dynamo.errors import CheckpointError

OWNER_FILE = "owner.json"


@dataclass(frozen=True)
class Owner:
    """A run that saves into a folder.

    Attributes:
        run: unique.
        host: of its first rank.
        process: of its first rank, on that host.
        since: when it first saved there, in UTC.
    """

    run: str
    host: str
    process: int
    since: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since} UTC"

    def is_alive(self) -> bool:
        """Whether its process is seen to run: on this host."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        return True


_claimed: dict[tuple[int, Path], Owner] = {}
"""What this process has written, by process and folder."""


def claim(folder: Path) -> None:
    """Make this process's run the owner of a folder, before it saves there.

    Warns if the process of another run lives that has saved there.

    Raises:
        CheckpointError: another run has taken the folder over since this one saved there.
    """
    key = (os.getpid(), folder.resolve())
    own, found = _claimed.get(key), _read(folder)
    if own is not None and found == own:
        return
    if own is not None and found is not None:
        raise CheckpointError(
            expected=f"one run that saves there, this one ({own})",
            got=f"another one ({found})",
            where=f"'{folder}'",
            fix="Give each run a folder of its own. If the other one has ended and this one is to "
            f"go on, remove '{OWNER_FILE}'. Nothing was written.",
        )
    if found is not None and found.process != os.getpid() and found.is_alive():
        warnings.warn(
            f"'{folder}' has checkpoints of another run that lives ({found}): each would remove "
            "what the other saves. This run takes the folder over; the other one gets an error "
            "when it saves again.",
            stacklevel=2,
        )
    _claimed[key] = _write(folder)


def _read(folder: Path) -> Owner | None:
    """The owner, if there is one; a damaged file is none."""
    try:
        content = json.loads((folder / OWNER_FILE).read_text())
        return Owner(
            str(content["run"]), str(content["host"]), int(content["process"]), content["since"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path) -> Owner:
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    owner = Owner(uuid.uuid4().hex, socket.gethostname(), os.getpid(), now)
    draft = folder / f"{OWNER_FILE}.{owner.run}"
    draft.write_text(json.dumps(asdict(owner), indent=1))
    draft.replace(folder / OWNER_FILE)
    return owner
