"""Hooks of mkdocs: files outside ``docs/``, and the list of decisions.

A link from a page to a file outside ``docs/`` works on a forge. For the site that file is copied to
``outside/`` and the link changed. A link to a file that is not there is left, and fails the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_UPWARD = re.compile(r"(?<=\]\()(?:\.\./)+[^)#\s]+")


def on_config(config: MkDocsConfig) -> None:
    """List every decision, and in the guide every page that ``mkdocs.yml`` does not list."""
    docs = Path(config.docs_dir)
    listed = str(config.nav)
    for section in config.nav or []:
        if "Guide" in section:
            names = sorted(path.name for path in docs.glob("*.md"))
            section["Guide"] += [name for name in names if f"'{name}'" not in listed]
    decisions = [f"decisions/{path.name}" for path in sorted((docs / "decisions").glob("*.md"))]
    config.nav = [*(config.nav or []), {"Decisions": decisions}]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files that pages link to."""
    for page in list(files.documentation_pages()):
        for link in _UPWARD.findall(page.content_string):
            name = _outside(link, page.src_uri, config)
            if name is not None and files.get_file_from_path(f"outside/{name}") is None:
                path = str(_root(config) / name)
                files.append(File.generated(config, f"outside/{name}", abs_src_path=path))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links to these files."""

    def changed(match: re.Match[str]) -> str:
        name = _outside(match[0], page.file.src_uri, config)
        return match[0] if name is None else relpath(f"outside/{name}", dirname(page.file.src_uri))

    return _UPWARD.sub(changed, markdown)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).resolve().parent


def _outside(link: str, page: str, config: MkDocsConfig) -> str | None:
    """The path of a linked file from the project's folder; ``None`` where it is a page, or not."""
    docs = _root(config) / Path(config.docs_dir).name
    path = (docs / dirname(page) / link).resolve()
    if not path.is_file() or docs in path.parents or _root(config) not in path.parents:
        return None
    return path.relative_to(_root(config)).as_posix()
