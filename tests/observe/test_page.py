"""The page of inspect_graphs() in a real browser, opened from the disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
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
    assert page.inner_text("#leftfile") == "_whole.backward.after_first.py"
    assert page.get_attribute("#rightfile", "href") == "_whole.backward.after_planner.py"


def _of_units() -> list[Listing]:
    """A pass before the planner changes every unit; the planner, then, only layers.1."""
    stages = ("partition", "after_first", "after_planner", "lowered")
    changes = {None: "abcc", "": "abcc", "layers.0": "abcc", "layers.1": "abcd"}
    return [
        _listing(unit, phase, stage, f"    {text} = f()")
        for unit, texts in changes.items()
        for phase in ("forward", "backward")
        for stage, text in zip(stages, texts.replace("cd", "dd"), strict=True)
        if unit != "layers.1" or phase == "backward"
    ]


def test_it_opens_at_what_the_planner_did_to_a_unit(browser: Any, tmp_path: Path) -> None:
    listings = _of_units()
    with _opened(browser, tmp_path, render_page(listings, [ShownStep(REPORT)], "", {})) as tab:
        assert tab.inner_text("#owners li[aria-current=true]") == "layers.0"
        assert tab.inner_text("#phases button[aria-pressed=true]") == "backward"
        assert tab.inner_text("#summary").startswith("after_first to after_planner: 0 lines moved")
        tab.click("#owners >> text=whole step")
        assert tab.inner_text("#summary").startswith("after_first to after_planner")


def test_it_opens_at_a_unit_where_no_pass_ran(browser: Any, tmp_path: Path) -> None:
    units = ("", "layers.0", "layers.1")
    listings = [
        _listing(unit, "backward", x, x) for unit in units for x in ("partition", "inductor")
    ]
    with _opened(browser, tmp_path, render_page(listings, [ShownStep(REPORT)], "", {})) as tab:
        assert tab.inner_text("#owners li[aria-current=true]") == "layers.0"
        assert "partition to inductor" in tab.inner_text("#summary")


def test_stages_are_explained(page: Any) -> None:
    assert page.inner_text("#rightdescription") == "Pass planner: it places."
    assert page.inner_text("#leftdescription") == ""
    assert (
        page.get_attribute("#stages >> text=after_planner", "title") == "Pass planner: it places."
    )
    assert page.get_attribute("#phases >> text=backward", "title") == "The graph of the backward."
    page.select_option("#left", label="partition")
    assert page.inner_text("#leftdescription") == "No pass has run."


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
    assert page.locator("#lanes text.lane").all_text_contents() == ["compute", "collectives"]
    titles = page.locator("#lanes rect title").all_text_contents()
    assert (
        titles[0]
        == "all_gather layers.1, 3.000 ms, 1.500 ms exposed, 4,096 bytes in messages of all ranks"
    )
    page.locator("#lanes rect").first.click()
    assert page.get_attribute("#owners li:has-text('layers.1')", "aria-current") == "true"
    assert page.locator("#lanes rect.chosen").count() == 2


def test_bars_are_named_and_coloured_by_units(page: Any) -> None:
    assert page.locator("#lanes text.bar").all_text_contents() == ["layers.1"] * 2 + ["layers.2"]
    ticks = page.locator("#lanes text.tick").all_text_contents()
    assert ticks == ["0 ms", "2", "4", "6", "8", "10"]
    fills = page.eval_on_selector_all(
        "#lanes rect", "all => all.map(e => getComputedStyle(e).fill)"
    )
    assert fills[0] == fills[1] != fills[2]
    swatches = dict(
        page.eval_on_selector_all(
            "#owners li", "all => all.map(e => [e.innerText, e.firstChild.style.background])"
        )
    )
    assert swatches["layers.1"] == fills[0]
    assert swatches["layers.2"] == fills[2]
    assert swatches["whole step"] == "transparent"
    grey = _rgb(page, "colour('')")
    assert max(grey) - min(grey) < 20, "the root has no hue"


def _rgb(page: Any, expression: str) -> tuple[int, int, int]:
    text = page.evaluate(
        f"(() => {{ const e = document.createElement('i'); e.style.color = {expression};"
        " document.body.append(e); return getComputedStyle(e).color; })()"
    )
    red, green, blue = (int(part) for part in re.findall(r"\d+", text)[:3])
    return red, green, blue


def test_no_unit_looks_like_the_red_edge(page: Any) -> None:
    page.evaluate("data.units = ['', ...Array.from({ length: 200 }, (_, i) => `layers.${i}`)]")
    for at in range(200):
        red, green, blue = _rgb(page, f"colour('layers.{at}')")
        assert red < 1.2 * max(green, blue), at


def test_compilation_is_cut_out(browser: Any, tmp_path: Path) -> None:
    found = replace(REPORT, cuts=(Cut(3.0, 5000.0),))
    recorded = [ShownStep(found, note="With compilation.")]
    with _opened(browser, tmp_path, render_page(LISTINGS, recorded, "", {})) as tab:
        assert tab.inner_text("#caption").startswith("10.00 ms without compilation; ")
        assert "With compilation." in tab.inner_text("#caption")
        assert tab.locator("#lanes text.cut").all_text_contents() == ["5.0 s"]
        assert tab.text_content("#lanes rect.cut title") == "5.0 s of compilation, cut out"
        bars = tab.locator("#lanes rect:not(.cut)")
        widths = [bars.nth(i).bounding_box()["width"] for i in range(bars.count())]
        assert widths[1] / widths[0] == pytest.approx(2, rel=0.05)
        assert tab.locator("#lanes text.bar").all_text_contents() == ["layers.1"] * 2 + ["layers.2"]
        ticks = tab.locator("#lanes line.tick")
        places = [ticks.nth(i).evaluate("e => Number(e.getAttribute('x1'))") for i in range(6)]
        steps = {round(b - a) for a, b in pairwise(places)}
        assert len(steps) == 2, "even but for the cut"
        assert max(steps) - min(steps) == pytest.approx(38, abs=1)


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


@pytest.mark.parametrize("width", [1600, 900, 500])
def test_nothing_runs_over_what_is_beside_it(browser: Any, tmp_path: Path, width: int) -> None:
    lines = (f"    a = f()  # File: /{LONG}.py:1 in forward, code: y = f(x)", f"    # {LONG}")
    unit = "layers." + LONG
    listings = [_listing(unit, "backward", stage, *lines) for stage in ("partition", "inductor")]
    listings.append(_listing(unit, "backward", f"after_{LONG}", f"    {LONG} = 1", *lines))
    descriptions = {f"after_{LONG}": LONG, "inductor": LONG}
    with _opened(
        browser, tmp_path, render_page(listings, [ShownStep(REPORT)], LONG, descriptions)
    ) as tab:
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        inside = """all => all.every(cell => [...cell.querySelectorAll("span")].every(
            e => e.getBoundingClientRect().right <= cell.getBoundingClientRect().right + 1))"""
        assert tab.eval_on_selector_all("#diff td", inside)
        assert tab.eval_on_selector_all(
            "#diff td, .heads > div, nav li",
            "all => all.every(e => e.scrollWidth <= e.clientWidth)",
        )


HOSTILE = (
    "a <!-- <script>",
    "<script>document.title = 'run'</script>",
    "</script><script>document.title = 'run'</script>",
    "<img src=x onerror=\"document.title = 'run'\">",
    "__DATA__ __SCRIPT__ __STYLE__",
    "&lt;b&gt; \\u003c",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_and_no_code_breaks_it(browser: Any, tmp_path: Path, text: str) -> None:
    """Where HTML ends a script, begins a comment or knows an element, the page shows the text."""
    unit = f"layers.{text}"
    stages = ("partition", f"after_{text}")
    listings = [_listing(unit, "backward", stage, f"    x = '{text}{stage}'") for stage in stages]
    events = tuple(replace(event, unit=unit) for event in MEASURED)
    report = replace(REPORT, units=(UnitSummary(unit, "", 0, 0, 0, 0),), measured=events)
    whole = render_page(listings, [ShownStep(report, text, text)], text, {stages[1]: text})
    with _opened(browser, tmp_path, whole) as tab:
        assert tab.inner_text("#subtitle") == text
        assert tab.locator("#owners li").all_inner_texts() == [unit]
        assert f"x = '{text}partition'" in tab.inner_text("#diff")
        assert tab.inner_text("#rightdescription").strip().startswith(text)
        assert tab.locator("script").count() == 2
        assert tab.title() != "run"


def test_a_narrow_window(page: Any) -> None:
    page.set_viewport_size({"width": 500, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
