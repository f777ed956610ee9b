"""The page of inspect_graphs() in a real browser, opened from the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_dynamo.findings import Findings, Measured, UnitFacts
from fsdp_dynamo.inspection.listings import Listing
from fsdp_dynamo.inspection.page import page_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, where there is one."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


def _listing(unit: str | None, phase: str, stage: str, *lines: str) -> Listing:
    return Listing(unit, 0, phase, stage, "\n".join(lines) + "\n")


GATHER = "    g = all_gather(p)  # all_gather layers.1"
QUIET = [f"    x{i} = f(x)  # layers.0" for i in range(12)]
LISTINGS = [
    _listing(None, "dynamo", "captured", "def forward(self):", "    return self.a<b>'\"</script>"),
    _listing(None, "backward", "partition", *QUIET, GATHER, "    y = mm(g)  # layers.1"),
    _listing(None, "backward", "after_first", *QUIET, GATHER, "    y = mm(g)  # layers.1"),
    _listing(None, "backward", "after_planner", GATHER, *QUIET, "    y = mm(g)  # layers.1"),
    _listing(None, "backward", "lowered", GATHER, *QUIET, "    y = mm2(g)  # layers.1"),
    _listing("layers.1", "backward", "partition", GATHER, "    y = mm(g)  # layers.1"),
    _listing("layers.1", "forward", "partition", "    z = mm(g)  # layers.1"),
    _listing("", "forward", "partition", "    e = embedding(t)  # (root)"),
]
MEASURED = (
    Measured("layers.1", "all_gather", "backward", 4096, 0.0, 3.0, 1.5),
    Measured("layers.1", "compute", "backward", 0, 3.0, 9.0, 0.0),
    Measured("layers.2", "compute", "backward", 0, 9.0, 10.0, 0.0),
)
FINDINGS = Findings(
    path="hooks",
    backend="",
    device="",
    world_size=2,
    units=tuple(UnitFacts(unit, "", 0, 0, 0) for unit in ("", "layers.1", "layers.2")),
    num_graphs=0,
    graph_breaks={},
    graphs=(),
    measured=MEASURED,
)


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """The page, and at the end: no error, and nothing asked of any server."""
    (tmp_path / "index.html").write_text(page_of(LISTINGS, FINDINGS, "two units", "A note."))
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    errors: list[str] = []
    asked: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"file://{tmp_path}/index.html")
    yield tab
    tab.close()
    assert errors == []
    assert all(url.startswith("file://") and "index.html" in url for url in asked)


def _rows(page: Any, kind: str) -> list[str]:
    return [
        text.split("  #")[0].strip() for text in page.locator(f"#diff td.{kind}").all_inner_texts()
    ]


def test_it_opens_where_something_changes(page: Any) -> None:
    assert page.inner_text("#facts") == "two units"
    assert page.locator("#owners li").all_inner_texts() == [
        "whole step",
        "layers.1",
        "(root)",
        "layers.2",
    ]
    assert (
        page.inner_text("#summary")
        == "after_first to after_planner: 1 lines moved, 0 added, 0 removed"
    )
    assert _rows(page, "moved") == ["g = all_gather(p)"] * 2
    assert _rows(page, "added") == []
    assert page.inner_text("#leftfile") == "_whole.backward.after_first.py"
    assert page.get_attribute("#rightfile", "href") == "_whole.backward.after_planner.py"


def test_stepping_through_the_passes(page: Any) -> None:
    page.keyboard.press("ArrowRight")
    assert "after_planner to lowered: 0 lines moved, 1 added, 1 removed" in page.inner_text(
        "#summary"
    )
    assert (_rows(page, "removed"), _rows(page, "added")) == (["y = mm(g)"], ["y = mm2(g)"])
    page.keyboard.press("ArrowRight")  # there is no further one
    assert "lowered" in page.inner_text("#summary")
    assert page.is_disabled("#next")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert page.inner_text("#summary") == "partition and after_first are the same, 14 lines"
    page.select_option("#right", label="lowered")
    assert "partition to lowered: 1 lines moved" in page.inner_text("#summary")


def test_lines_that_stay_are_folded(page: Any) -> None:
    fold = page.locator("#diff tr.fold")
    assert fold.all_inner_texts() == ["6 lines that stay"]
    before = page.locator("#diff tr").count()
    fold.click()
    assert page.locator("#diff tr").count() == before + 5
    page.uncheck("#fold")
    assert page.locator("#diff tr.fold").count() == 0


def test_units_and_phases(page: Any) -> None:
    page.click("#owners >> text=layers.1")
    assert page.locator("#phases button").all_inner_texts() == ["forward", "backward"]
    page.click("#phases >> text=forward")
    assert "z = mm(g)" in page.inner_text("#diff")
    page.fill("#filter", "ROOT")
    assert page.locator("#owners li:visible:not(.none)").all_inner_texts() == ["(root)"]


def test_the_timeline_leads_to_units(page: Any) -> None:
    assert "10.00 ms" in page.inner_text("#caption")
    assert "A note." in page.inner_text("#caption")
    assert page.locator("#lanes text").all_text_contents() == ["compute", "collectives"]
    titles = page.locator("#lanes rect title").all_text_contents()
    assert titles[0] == "all_gather layers.1, 3.000 ms, 1.500 ms exposed, 4,096 bytes"
    page.locator("#lanes rect").first.click()
    assert page.get_attribute("#owners >> text=layers.1", "aria-current") == "true"
    assert page.locator("#lanes rect.chosen").count() == 2


def test_an_address_leads_to_a_place(page: Any) -> None:
    page.click("#phases >> text=dynamo")
    address = page.url
    assert "phase=dynamo" in address
    assert "self.a<b>'\"</script>" in page.inner_text("#diff")
    page.click("#owners >> text=(root)")
    page.goto("about:blank")
    page.goto(address)
    assert page.inner_text("#phases button[aria-pressed=true]") == "dynamo"
    page.goto(
        address.split("#")[0] + "#graph=layers.1&phase=forward&left=partition&right=partition"
    )
    assert "z = mm(g)" in page.inner_text("#diff")


def test_a_narrow_window(page: Any) -> None:
    page.set_viewport_size({"width": 500, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
