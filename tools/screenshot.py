"""A picture of a page: ``python tools/screenshot.py out/index.html docs/pictures/inspection.png``.

Needs playwright and a Chromium. The picture in the documentation shows the step of
``tools/inspected.py``, which says how to make its page. The page opens where the picture is to be
taken; another place may stand in the address:
``out/index.html#graph=layers.1&phase=backward&left=partition&right=after_planner``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(page: str, picture: str) -> None:
    """Open the page from the disk and take a picture of it, 1400 x 900."""
    path, bar, place = page.partition("#")
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        tab.goto(Path(path).resolve().as_uri() + bar + place)
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
