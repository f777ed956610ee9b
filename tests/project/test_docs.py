"""The pages: they build, no link of theirs is dead, and every public name has its entry."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fsdp_dynamo

ROOT = Path(__file__).parents[2]
ALIASES = {"FSDP": "FullyShardedDataParallel"}


def test_pages_build_without_a_dead_link(tmp_path: Path) -> None:
    """``strict``: what MkDocs warns of (links, anchors, docstrings that name no argument) fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    entries = {name for text in pages.values() for name in re.findall(r'id="([\w.]+)"', text)}
    names = [ALIASES.get(n, n) for n in fsdp_dynamo.__all__ if not n.startswith("_")]
    homes = {name: getattr(getattr(fsdp_dynamo, name), "__module__", "") for name in names}
    paths = {name: {f"fsdp_dynamo.{name}", f"{homes[name]}.{name}"} for name in names}
    assert [name for name in names if not paths[name] & entries] == []
    needed = [re.findall(r'<(?:script|link|img)[^>]*="(https?:[^"]*)', t) for t in pages.values()]
    assert not any(needed)  # opens from file:// without a network


def test_links_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_features_have_a_state_and_tests() -> None:
    """Numbers have no gap. The build of the pages finds links to files that do not exist."""
    text = (ROOT / "docs" / "features.md").read_text()
    rows = re.findall(r"^\| ([A-Z])(\d+)(a?) \| .+? \| (.+?) \| (.*)\|$", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| [A-Z]+\d", text, re.MULTILINE)) > 60
    last = ("", 0)
    for letter, digits, after, state, tests in rows:
        number = int(digits)
        assert (letter, number) == (letter, last[1] + (not after) if letter == last[0] else 1)
        last = (letter, number)
        assert re.match(r"\*\*(yes|in part|no)\*\*", state), last
        assert "](../tests/" in tests or state.startswith("**no**"), last


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
