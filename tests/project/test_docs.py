"""The pages: they build, no link of theirs is dead, and paths of the code exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pages_build_without_a_dead_link(tmp_path: Path) -> None:
    """``strict``: what MkDocs warns of (links, anchors, docstrings that name no argument) fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    needed = [re.findall(r'<(?:script|link|img)[^>]*="(https?:[^"]*)', t) for t in pages]
    assert not any(needed)  # opens from file:// without a network


def test_links_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_paths_of_the_code_exist() -> None:
    """A path below a package that a page names is there; so is one that begins with a folder of
    ``fsdp_dynamo``, as in the walk through the house."""
    folders = [p.name for p in (ROOT / "fsdp_dynamo").iterdir() if (p / "__init__.py").exists()]
    below = re.compile(rf"`((?:{'|'.join(folders)})/[\w/]+\.py)`")
    missing = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")):
        text = page.read_text()
        named = re.findall(r"\b((?:fsdp_dynamo|graph_passes|benchmarks|tests)/[\w/]+\.py)\b", text)
        named += [f"fsdp_dynamo/{path}" for path in below.findall(text)]
        missing += [f"{page.name}: {path}" for path in named if not (ROOT / path).exists()]
    assert missing == []
