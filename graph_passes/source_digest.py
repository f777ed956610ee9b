"""Hash of a package's sources: what was compiled by other code is compiled again."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache  # an edit after the import changes the file, but not the code that runs
def source_digest(folder: Path) -> str:
    """Hash of all Python files below a folder, their paths included."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


__all__ = ["source_digest"]
