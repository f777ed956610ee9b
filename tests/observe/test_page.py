"""The page of inspect_graphs() in a real browser, opened from the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_dynamo.observe.explanation import Cut, MeasuredEvent, StepReport, UnitSummary
from fsdp_dynamo.observe.inspection.listings import Listing
from fsdp_dynamo.observe.inspection.page import ShownStep, render_page

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
    MeasuredEvent("layers.1", "all_gather", "backward", 4096, 0.0, 3.0, 1.5, 4096),
    MeasuredEvent("layers.1", "compute", "backward", 0, 3.0, 9.0, 0.0),
    MeasuredEvent("layers.2", "compute", "backward", 0, 9.0, 10.0, 0.0),
)
REPORT = StepReport(
    mode="hooks",
    backend="",
    device="",
    world_size=2,
    units=tuple(UnitSummary(unit, "", 0, 0, 0, 0) for unit in ("", "layers.1", "layers.2")),
    num_graphs=0,
    graph_breaks=(),
    graphs=(),
    measured=MEASURED,
)
DESCRIPTIONS = {"partition": "No pass has run.", "after_planner": "Pass planner: it places."}


@contextmanager
def _opened(browser: Any, folder: Path, text: str) -> Iterator[Any]:
    """A page, and at the end: no error, and nothing asked of any server."""
    (folder / "index.html").write_text(text)
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    errors: list[str] = []
    asked: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"file://{folder}/index.html")
    yield tab
    tab.close()
    assert errors == []
    assert all(url.startswith("file://") and "index.html" in url for url in asked)


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A page with whole steps and units."""
    text = render_page(LISTINGS, [ShownStep(REPORT, note="A note.")], "two units", DESCRIPTIONS)
    with _opened(browser, tmp_path, text) as tab:
        yield tab


def _rows(page: Any, kind: str) -> list[str]:
    return [
        text.split("  #")[0].strip() for text in page.locator(f"#diff td.{kind}").all_inner_texts()
    ]


def test_it_opens_where_something_changes(page: Any) -> None:
    assert page.inner_text("#subtitle") == "two units"
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
    assert page.inner_text("#rightdescription") == "Pass planner: it places."
    assert page.inner_text("#leftdescription") == ""
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
    assert page.inner_text("#summary") == "partition and after_first are equal (14 lines)"
    page.select_option("#right", label="lowered")
    assert "partition to lowered: 1 lines moved" in page.inner_text("#summary")


def test_unchanged_lines_are_folded(page: Any) -> None:
    fold = page.locator("#diff tr.fold")
    assert fold.all_inner_texts() == ["6 unchanged lines"]
    before = page.locator("#diff tr").count()
    fold.click()
    assert page.locator("#diff tr").count() == before + 5
    page.uncheck("#fold")
    assert page.locator("#diff tr.fold").count() == 0


def test_units_phases_and_the_timeline(page: Any) -> None:
    page.click("#owners >> text=layers.1")
    assert page.locator("#phases button").all_inner_texts() == ["forward", "backward"]
    page.click("#phases >> text=forward")
    assert "z = mm(g)" in page.inner_text("#diff")
    page.fill("#filter", "ROOT")
    assert page.locator("#owners li:visible:not(.none)").all_inner_texts() == ["(root)"]
    assert page.locator("#lanes text.bar").all_text_contents() == ["layers.1"] * 2 + ["layers.2"]
    assert "10.00 ms" in page.inner_text("#caption")
    assert "A note." in page.inner_text("#caption")
    assert page.locator("#lanes text.lane").all_text_contents() == ["compute", "collectives"]
    titles = page.locator("#lanes rect title").all_text_contents()
    assert titles[0].startswith("all_gather layers.1, 3.000 ms, 1.500 ms exposed, 4,096 bytes")
    page.locator("#lanes rect").first.click()
    assert page.get_attribute("#owners li:has-text('layers.1')", "aria-current") == "true"
    assert page.locator("#lanes rect.chosen").count() == 2


def test_compilation_is_cut_out(browser: Any, tmp_path: Path) -> None:
    found = replace(REPORT, cuts=(Cut(3.0, 5000.0),))
    recorded = [ShownStep(found, note="With compilation.")]
    with _opened(browser, tmp_path, render_page(LISTINGS, recorded, "", {})) as tab:
        assert tab.inner_text("#caption").startswith("10.00 ms without compilation; ")
        assert "With compilation." in tab.inner_text("#caption")
        assert tab.locator("#lanes text.cut").all_text_contents() == ["5.0 s"]
        assert tab.text_content("#lanes rect.cut title") == "5.0 s of compilation, cut out"


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


LONG = "x" * 300


def test_nothing_runs_over_what_is_beside_it(browser: Any, tmp_path: Path) -> None:
    lines = (f"    a = f()  # File: /{LONG}.py:1 in forward, code: y = f(x)", f"    # {LONG}")
    unit = "layers." + LONG
    listings = [_listing(unit, "backward", stage, *lines) for stage in ("partition", "inductor")]
    listings.append(_listing(unit, "backward", f"after_{LONG}", f"    {LONG} = 1", *lines))
    text = render_page(
        listings, [ShownStep(REPORT)], LONG, {f"after_{LONG}": LONG, "inductor": LONG}
    )
    inside = """all => all.every(cell => [...cell.querySelectorAll("span")].every(
        e => e.getBoundingClientRect().right <= cell.getBoundingClientRect().right + 1))"""
    with _opened(browser, tmp_path, text) as tab:
        for width in (1600, 900, 500):
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert tab.eval_on_selector_all("#diff td", inside)
            assert tab.eval_on_selector_all(
                "#diff td, .heads > div, nav li",
                "all => all.every(e => e.scrollWidth <= e.clientWidth)",
            )


HOSTILE = (
    "a <!-- <script> </script><script>document.title = 'run'</script>"
    "<img src=x onerror=\"document.title = 'run'\"> __DATA__ __SCRIPT__ __STYLE__ &lt;b&gt; \\u003c"
)


def test_no_name_and_no_code_breaks_it(browser: Any, tmp_path: Path) -> None:
    """Where HTML ends a script, begins a comment or knows an element, the page shows the text."""
    unit = f"layers.{HOSTILE}"
    stages = ("partition", f"after_{HOSTILE}")
    texts = [f"    x = '{HOSTILE}{stage}'" for stage in stages]
    listings = [_listing(unit, "backward", *both) for both in zip(stages, texts, strict=True)]
    events = tuple(replace(event, unit=unit) for event in MEASURED)
    report = replace(REPORT, units=(UnitSummary(unit, "", 0, 0, 0, 0),), measured=events)
    shown = [ShownStep(report, HOSTILE, HOSTILE)]
    whole = render_page(listings, shown, HOSTILE, {stages[1]: HOSTILE})
    with _opened(browser, tmp_path, whole) as tab:
        assert tab.inner_text("#subtitle") == HOSTILE
        assert tab.locator("#owners li").all_inner_texts() == [unit]
        assert f"x = '{HOSTILE}partition'" in tab.inner_text("#diff")
        assert tab.inner_text("#rightdescription").strip().startswith(HOSTILE)
        assert tab.locator("script").count() == 2
        assert tab.title() != "run"
