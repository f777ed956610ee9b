"""Snippets of docs/recipes.md, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def recipe(heading: str) -> str:
    """The Python code below a heading of the page."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return str(code)
