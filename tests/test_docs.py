"""The pages: they build, no link of theirs is dead, and every public name has its entry."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fsdp_dynamo

ROOT = Path(__file__).parent.parent
ALIASES = {"FSDP": "FullyShardedDataParallel", "explain": "explain.explain"}


def test_pages_build_without_a_dead_link(tmp_path: Path) -> None:
    """``strict``: what MkDocs warns of (links, anchors, docstrings that name no argument) fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    entries = {name for text in pages.values() for name in re.findall(r'id="([\w.]+)"', text)}
    names = [ALIASES.get(n, n) for n in fsdp_dynamo.__all__ if not n.startswith("_")]
    assert [name for name in names if f"fsdp_dynamo.{name}" not in entries] == []
    needed = [re.findall(r'<(?:script|link|img)[^>]*="(https?:[^"]*)', t) for t in pages.values()]
    assert not any(needed)  # opens from file:// without a network


def test_links_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
