"""Real text that every Python brings along: the sources of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

PACKAGES = ("asyncio", "collections", "email", "http", "importlib", "json", "logging", "unittest")


def source_files() -> list[Path]:
    """The standard library's top-level modules and a few of its packages, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = [root, *(root / package for package in PACKAGES)]
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


class TextBatches:
    """Random windows of this rank's part of the text.

    Rank ``r`` of ``n`` reads every ``n``-th file from the ``r``-th on, so no two ranks share one.

    Args:
        num_bytes: of text over all ranks; less if there is no more.
        batch: windows a step.
        length: tokens a window.
        seed: of the windows' places.
    """

    def __init__(
        self, rank: int, world_size: int, num_bytes: int, batch: int, length: int, seed: int
    ) -> None:
        text = bytearray()
        wanted = num_bytes // world_size
        for path in source_files()[rank::world_size]:
            if len(text) >= wanted:
                break
            text += path.read_bytes()
        self.text = torch.frombuffer(text[:wanted], dtype=torch.uint8)
        if len(self.text) <= length:
            raise SystemExit(
                f"--text-bytes: expected more than {length} bytes (--length) for each of "
                f"{world_size} ranks, got {len(self.text)}. Raise --text-bytes."
            )
        self.batch = batch
        self.length = length
        self.generator = torch.Generator().manual_seed(seed * 1000 + rank)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (the inputs one byte on), each (batch, length), int64."""
        starts = torch.randint(
            len(self.text) - self.length, (self.batch, 1), generator=self.generator
        )
        windows = self.text[starts + torch.arange(self.length + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
