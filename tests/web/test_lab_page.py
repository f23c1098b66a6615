"""If this fails, somebody opens the lab book in a browser and does not see, hear or keep what a run left there."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rung.runs.query import open_run
from rung.runs.record import append_event
from rung.web.export import export
from tests.web.conftest import STATIC
from tests.web.labs import SPIKE, ServedLab, row, start, write_book, write_long, write_many

Page = Any  # of playwright, which is optional
Visit = Callable[..., Page]
NUM_MANY = 1000
EVIL = "<img src=x onerror=\"document.title='stolen'\"><script>document.title='stolen'</script>"
PAGES = (
    "runs",
    "curves?runs=piano/1,piano/2,piano/5",
    "run/piano/2",
    "compare?a=piano/1&b=piano/2",
    "health/piano/5",
    "samples?runs=piano/1,mnist/1",
)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of `few`, a thousand, and a long one: 1,007 in all."""
    root = tmp_path_factory.mktemp("book") / "runs"
    write_book(root)
    write_many(root, NUM_MANY)
    write_long(root, 5000, 6)
    return root


@pytest.fixture(scope="module")
def served(book: Path, browser: Any) -> Iterator[ServedLab]:
    made = ServedLab(book)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[ServedLab]:
    """Six runs with all that a page can show. Nothing here is changed."""
    root = tmp_path_factory.mktemp("few") / "runs"
    write_book(root)
    made = ServedLab(root)
    yield made
    made.stop()


@pytest.fixture
def small(tmp_path: Path, browser: Any) -> Iterator[ServedLab]:
    """A lab to write in."""
    root = tmp_path / "runs"
    first = start(root, why="a first try")
    append_event(first.path, "note", text=f"see **this** {EVIL} [piano/1](piano/1) [bad](javascript:alert(1))")
    for step in range(30):
        first.log(step, row(step, random.Random(step)))
    first.finish("finished")
    made = ServedLab(root)
    yield made
    made.stop()


def go(page: Page, served: ServedLab, to: str) -> Page:
    page.goto(f"{served.url}#/{to}")
    page.wait_for_function("!document.getElementById('main').hasAttribute('aria-busy')")
    return page


def count(page: Page, text: str) -> None:
    page.locator("#count", has_text=text).wait_for()


def names(page: Page) -> list[str]:
    found: list[str] = page.eval_on_selector_all(".trow", "rows => rows.map(row => row.dataset.run)")
    return found


# Runs


def test_a_thousand_runs_are_a_few_rows_at_a_time(served: ServedLab, visit: Visit) -> None:
    page = visit(served.url)
    count(page, "1007 runs")
    assert page.get_attribute(".runs-grid", "aria-rowcount") == "1008"
    assert 10 < len(names(page)) < 60
    page.focus(".tbody")
    page.keyboard.press("End")
    page.wait_for_function("document.querySelector('.trow[data-at]')?.dataset.i === '1006'")
    last = names(page)[-1]
    assert len(names(page)) < 60
    page.keyboard.press("Enter")
    page.locator("h1", has_text=last).wait_for()


def test_the_tree_shows_each_attempt_below_the_run_it_came_from(served: ServedLab, visit: Visit) -> None:
    page = visit(f"{served.url}#/runs?experiment=piano")
    count(page, "5 of 1007 runs")
    assert names(page) == ["piano/1", "piano/2", "piano/3", "piano/4", "piano/5"]
    depths = page.eval_on_selector_all(".trow .name", "found => found.map(one => parseInt(one.style.paddingLeft) / 12)")
    assert depths == [0, 1, 2, 2, 1]
    second = page.locator(".trow[data-run='piano/2']")
    assert "grad_clip 1 → 0.5" in second.inner_text()
    assert second.locator("[data-verdict=supported]").count() == 1
    assert page.locator(".trow[data-run='piano/5'] [data-status=diverged]").count() == 1


def test_runs_are_found_by_a_config_value_by_words_and_sorted_by_any_metric(served: ServedLab, visit: Visit) -> None:
    page = visit(f"{served.url}#/runs?experiment=piano&columns=optimizer.grad_clip,min:loss")
    count(page, "5 of 1007")
    page.fill(".filter", "optimizer.grad_clip<0.9")
    count(page, "1 of 1007")
    assert names(page) == ["piano/2"]
    assert "0.5" in page.inner_text(".trow")
    page.fill(".filter", "/harder|HIGHER/")
    count(page, "2 of 1007")
    page.fill(".filter", "nothing.like.it>1")
    page.locator("[role=alert]", has_text="nothing.like.it").wait_for()
    page.fill(".filter", "")
    count(page, "5 of 1007")
    page.click(".sort[title='Sort by min:loss']")
    page.locator("[aria-sort=ascending]").wait_for()
    by_least = names(page)
    page.click(".sort[title='Sort by min:loss']")
    page.locator("[aria-sort=descending]").wait_for()
    assert names(page) == by_least[::-1]
    assert "sort=min" in page.url  # the address says all that is set


def test_seeds_are_one_row_with_mean_and_spread(served: ServedLab, visit: Visit) -> None:
    page = visit(f"{served.url}#/runs?experiment=piano&group=1")
    count(page, "groups")
    rows = page.locator(".trow").all_inner_texts()  # seeds 7, 1 and 2 of one config
    assert any("±" in text and "\n3\n" in text for text in rows)


# Curves


def test_curves_name_what_differs_and_keep_their_colours(few: ServedLab, visit: Visit) -> None:
    page = visit(f"{few.url}#/runs?experiment=piano")
    count(page, "5 of 6")
    for run in ("piano/1", "piano/2", "piano/5"):
        page.check(f".trow[data-run='{run}'] input")
    page.keyboard.press("c")
    page.locator(".panel[data-metric=loss][data-points='460']").wait_for()
    page.locator(".legend [data-run='piano/2'] .differs", has_text="grad_clip 0.5").wait_for()
    assert "learning_rate 1" in page.inner_text(".legend [data-run='piano/5'] .differs")
    stroke = "run => getComputedStyle(document.querySelector(`.legend [data-run='${run}'] line`)).stroke"
    before = {run: page.evaluate(stroke, run) for run in ("piano/2", "piano/5")}
    assert len({page.evaluate(stroke, "piano/1"), *before.values()}) == 3
    page.click("[aria-label='Remove piano/1']")
    page.locator(".panel[data-metric=loss][data-points='260']").wait_for()
    assert {run: page.evaluate(stroke, run) for run in before} == before


def test_no_spike_and_no_nan_of_a_long_run_is_hidden(served: ServedLab, visit: Visit) -> None:
    page = visit(f"{served.url}#/curves?runs=long/1&metrics=loss&smooth=0.9")
    page.locator(".panel[data-metric=loss][data-points='5000']").wait_for()
    assert "not finite at times" in page.get_attribute(".stage", "aria-label")
    with page.expect_download() as download:
        page.click("[aria-label='Save loss as CSV']")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == "run,step,loss,least,most"
    assert len(lines) < 1100
    most = max((line.split(",") for line in lines[1:]), key=lambda cells: float(cells[4]))
    assert float(most[4]) == 50.0
    assert abs(int(most[1]) - SPIKE) < 10
    with page.expect_download() as download:
        page.click("[aria-label='Save loss as SVG']")
    drawn = Path(download.value.path()).read_text()
    assert drawn.startswith("<svg")
    assert drawn.count("<path") == 2  # what was logged, and the smoothed line
    with page.expect_download() as download:
        page.click("[aria-label='Save loss as PNG']")
    assert Path(download.value.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_zooming_asks_for_every_point_of_the_stretch(served: ServedLab, visit: Visit) -> None:
    page = visit(f"{served.url}#/curves?runs=long/1&metrics=loss,norm")
    page.locator(".panel[data-metric=norm][data-points='5000']").wait_for()
    box = page.locator(".panel[data-metric=loss] .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.30 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_function("Number(document.querySelector('[data-metric=norm]').dataset.points) < 300")  # both zoom
    assert 230 < int(page.get_attribute("[data-metric=loss]", "data-points")) < 300
    page.keyboard.press("0")
    page.locator(".panel[data-metric=norm][data-points='5000']").wait_for()


def test_one_cursor_reads_all_plots_and_the_axis_can_be_another(few: ServedLab, visit: Visit) -> None:
    page = visit(f"{few.url}#/curves?runs=piano/1,piano/2&metrics=loss,norm")
    page.locator(".panel[data-metric=norm][data-points='400']").wait_for()
    page.locator(".panel[data-metric=loss] .stage").focus()
    page.keyboard.press("ArrowRight")
    read = page.locator(".readout:visible")
    read.nth(1).wait_for()
    assert read.count() == 2
    steps = {text.split("\n")[0] for text in read.all_inner_texts()}
    assert len(steps) == 1
    assert "piano/2" in read.first.inner_text()
    page.select_option(".toolbar select", "targets")
    page.wait_for_function(f"document.querySelector('[data-metric=loss]').dataset.last === '{199 * 4096}'")
    page.click("button:text-is('log y')")
    assert "logy=1" in page.url


def test_a_new_step_and_a_new_run_appear_by_themselves(small: ServedLab, tmp_path: Path, visit: Visit) -> None:
    root = tmp_path / "runs"
    record = start(root, parent="piano/1")
    for step in range(5):
        record.log(step, row(step, random.Random(step)))
    curves = go(visit(small.url), small, "curves?runs=piano/2&metrics=loss")
    curves.locator("#line[data-state=live]").wait_for()
    curves.locator(".panel[data-last='4']").wait_for()
    runs = go(visit(small.url), small, "runs")
    runs.locator("#line[data-state=live]").wait_for()
    record.log(5, row(5, random.Random(5)))
    curves.locator(".panel[data-last='5']").wait_for()
    other = start(root, parent="piano/2")
    other.finish("crashed")
    runs.locator(".trow[data-run='piano/3'] [data-status=crashed]").wait_for()
    record.finish("finished")
    runs.locator(".trow[data-run='piano/2'] [data-status=finished]").wait_for()


# A run, and writing


def test_a_run_begins_with_its_answer(few: ServedLab, visit: Visit) -> None:
    page = visit(f"{few.url}#/run/piano/2")
    tiles = page.locator(".tiles")
    best = open_run("piano/2", few.app.state.lab.book.root).best or {}
    assert f"{best['loss']:.4f}" in tiles.inner_text()
    assert "unigram loses 4.1000" in tiles.inner_text()
    assert "grad_clip 1.0 → 0.5" in page.inner_text(".answer").replace("->", "→")
    page.locator("[aria-label='eval/full_val/loss'] canvas").wait_for()
    assert page.locator("table.config tr").count() == 1  # the key that somebody set
    page.check("label:has-text('all keys')")
    assert page.locator("table.config tr").count() > 3


def test_what_is_written_is_kept_and_is_never_markup(small: ServedLab, tmp_path: Path, visit: Visit) -> None:
    page = go(visit(small.url), small, "run/piano/1")
    page.locator(".notes strong", has_text="this").wait_for()
    assert EVIL.split(">")[0] in page.inner_text(".notes")
    assert page.locator(".notes img, .notes script").count() == 0
    assert page.get_attribute(".notes a", "href") == "#/run/piano/1"
    assert page.locator("a[href^=javascript]").count() == 0

    page.fill("#write-note", "- one\n- `two`")
    page.click("#form-note button")
    page.locator(".notes li ul li code", has_text="two").wait_for()
    page.fill("#write-hypothesis", EVIL)
    page.click("#form-hypothesis button")
    page.locator(".answer dd", has_text="<script>").wait_for()
    page.select_option("#write-verdict", "refuted")
    page.fill("#write-verdict-text", "it did not")
    page.click("#form-verdict button")
    page.fill("#write-tags", "keep wide")
    page.click("#form-tags button")
    page.locator(".answer .tag", has_text="wide").wait_for()
    run = open_run("piano/1", tmp_path / "runs")
    assert run.document["why"] == EVIL
    assert run.document["tags"] == ["keep", "wide"]
    assert (run.document["verdict"]["word"], run.document["verdict"]["text"]) == ("refuted", "it did not")
    assert [note["text"] for note in run.notes()][-1] == "- one\n- `two`"
    assert "stolen" not in page.title()
    page.keyboard.press("1")
    page.locator(".trow [data-verdict=refuted]").wait_for()
    assert page.locator(".trow img").count() == 0


def test_a_run_is_renamed_and_goes_to_the_trash_and_back(small: ServedLab, tmp_path: Path, visit: Visit) -> None:
    root = tmp_path / "runs"
    page = go(visit(small.url), small, "run/piano/1")
    page.click("button:text-is('Rename')")
    page.fill("dialog input", "bach/7")
    page.click("dialog button.main")
    page.locator("h1", has_text="bach/7").wait_for()
    assert (root / "bach" / "7").exists()
    page.click(".side .danger")
    page.click("dialog .danger")
    page.locator("#toast", has_text="in the trash").wait_for()
    assert not (root / "bach" / "7").exists()
    page.click("#toast button")
    page.locator("h1", has_text="bach/7").wait_for()
    assert (root / "bach" / "7" / "run.json").exists()


def test_nobody_is_offered_to_write_where_it_is_read_only(small: ServedLab, tmp_path: Path, visit: Visit) -> None:
    served = ServedLab(tmp_path / "runs", is_read_only=True)
    page = visit(f"{served.url}#/run/piano/1")
    page.locator(".notes strong").wait_for()
    assert page.locator("form, textarea, .danger").count() == 0
    served.stop()


# Compare, health, samples


def test_comparing_says_what_changed_and_judges_when_asked(few: ServedLab, visit: Visit) -> None:
    page = visit(f"{few.url}#/compare?a=piano/1&b=piano/2")
    changed = page.locator("tr[data-kind='the change']")
    changed.wait_for()
    assert changed.inner_text().split() == ["optimizer.grad_clip", "1", "0.5", "the", "change"]
    assert page.locator(".sentence[data-strict=false]", has_text="confounder").count() == 1
    assert page.locator("text=Not looked at").count() == 1
    few.app.state.lab.is_read_only = True  # so that this look is not counted
    page.click("#judge")
    page.locator(".judged .kind").wait_for()
    few.app.state.lab.is_read_only = False
    page.keyboard.press("s")
    page.wait_for_function("location.hash.includes('a=piano/2&b=piano/1')")


def test_findings_stand_beside_the_curve_with_what_was_not_looked_at(few: ServedLab, visit: Visit) -> None:
    page = visit(f"{few.url}#/health/piano/5")
    finding = page.locator(".finding[data-rule=N1]")
    finding.wait_for()
    assert finding.get_attribute("data-severity") == "fatal"
    assert "step 51" in finding.inner_text()
    page.locator(".panel .stage canvas").nth(1).wait_for()
    assert page.locator("summary", has_text="Not looked at").count() == 1
    share = page.locator("tr[data-part=wait]")
    share.wait_for()
    assert "20.0 %" in share.inner_text()
    assert "1.25× as fast" in share.inner_text()
    finding.locator("a", has_text="Since step 51").click()
    page.wait_for_function("location.hash.includes('at=51') && location.hash.startsWith('#/curves')")


def test_layers_are_a_picture_that_can_be_read(few: ServedLab, visit: Visit) -> None:
    page = visit(f"{few.url}#/health/piano/1")
    heat = page.locator("canvas.heat")
    heat.wait_for()
    assert page.evaluate("(({width, height}) => [width, height])(document.querySelector('canvas.heat'))") == [10, 8]
    heat.focus()
    page.keyboard.press("ArrowDown")
    assert page.inner_text(".heat-at").split()[:3] == ["step", "0", "blocks.0.mlp"]
    page.select_option("[aria-label='Number per layer']", "tensors weight")
    page.wait_for_function("document.querySelector('[aria-label=\"Number per layer\"]').value === 'tensors weight'")
    page.locator("canvas.heat").focus()
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    assert page.inner_text(".heat-at").split() == ["step", "180", "blocks.0.attention", "2.8"]


# The brightest row of the spectrogram, as a share of its height from below.
PITCH = """() => {
  const canvas = document.querySelector(".lane[data-run='piano/1'] .spectrogram[data-ready]");
  if (!canvas) return null;
  const {data, width, height} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const rows = Array.from({length: height}, (_, y) => data[4 * (y * width + (width >> 1))]);
  return 1 - rows.indexOf(Math.max(...rows)) / height;
}"""


def test_a_sound_is_seen_at_its_pitch_and_at_the_chosen_step(few: ServedLab, visit: Visit) -> None:
    page = visit(f"{few.url}#/samples?runs=piano/1,piano/2")
    page.wait_for_function(PITCH)
    high = page.evaluate(PITCH)  # 419 Hz
    # In mels: (m(419) - m(40)) / (m(11000) - m(40)), by the formula of O'Shaughnessy.
    assert high == pytest.approx(0.164, abs=0.03)
    assert page.inner_text(".lane[data-run='piano/1'] pre").strip() == "what it says at step 199"
    page.keyboard.press(",")
    page.locator("pre", has_text="what it says at step 100").wait_for()
    page.wait_for_function(f"({PITCH})() < {high} - 0.02")  # 320 Hz
    assert page.get_attribute("#to-curve", "href") == "#/curves?runs=piano/1,piano/2&at=100"
    assert page.locator(".lane[data-run='piano/1'][data-stem=walk] img").evaluate("image => image.decode()") is None
    assert page.get_attribute(".roll", "aria-label").endswith("3 notes in 1.7 s")


def test_another_run_takes_over_at_the_same_moment(small: ServedLab, tmp_path: Path, visit: Visit) -> None:
    from tests.web.labs import wav

    root = tmp_path / "runs"
    for hz in (220, 330):
        record = start(root, "sound")
        record.add_sample(10, "clip.wav", wav(20.0, hz), "long enough")
        record.finish("finished")
    page = go(visit(small.url), small, "samples?runs=sound/1,sound/2")
    page.locator(".spectrogram[data-ready]").nth(1).wait_for()
    page.wait_for_function("document.querySelector('.transport output').textContent.endsWith('of 20.0 s')")
    at = "Number(document.querySelector('.transport').dataset.at)"
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"{at} === 5")
    page.keyboard.press("b")
    page.locator(".lane[data-run='sound/2'][data-heard=true]").wait_for()
    assert page.evaluate(at) == 5
    page.keyboard.press("Space")
    page.wait_for_function(f"{at} > 5.05")
    reached = page.evaluate(at)
    page.keyboard.press("b")
    page.locator(".lane[data-run='sound/1'][data-heard=true]").wait_for()
    page.wait_for_function(f"{at} > {reached}")
    assert page.get_attribute(".transport", "data-playing") == "true"
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelector('.transport').dataset.playing === 'false'")


def test_what_a_loop_of_ones_own_logged_is_shown_as_text(few: ServedLab, visit: Visit) -> None:
    page = visit(f"{few.url}#/samples?runs=mnist/1")
    table = page.locator("[data-kind=table]")
    table.wait_for()
    assert "<b>round</b>" in table.inner_text()
    assert table.locator("b", has_text="round").count() == 0
    assert page.locator("[data-kind=histogram] rect").count() == 3


# Manners


AUDIT = """(LIMIT) => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const over = (text, under) => {  // any colour that CSS knows, on an opaque ground
    paint.fillStyle = `rgb(${under.join(" ")})`; paint.fillRect(0, 0, 1, 1);
    paint.fillStyle = text; paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (element) =>
    element === null ? [255, 255, 255] : over(getComputedStyle(element).backgroundColor, ground(element.parentElement));
  const told = (element) => element.checkVisibility({opacityProperty: true});
  const skipped = "canvas, select, title, noscript, .u-over";
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    const words = walker.currentNode.textContent.trim().slice(0, 30);
    if (!words || !told(element) || element.closest(skipped)) continue;
    if (element.closest("button, input, select")?.disabled) continue;
    const under = ground(element), text = over(element instanceof SVGElement ? style.fill : style.color, under);
    const [a, b] = [light(text), light(under)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < LIMIT) bad.push(`${ratio.toFixed(2)} ${element.tagName}.${element.className} ${words}`);
  }
  for (const field of document.querySelectorAll("button, input, select, textarea, a[href], canvas[role=img], img")) {
    if (!field.checkVisibility()) continue;
    const isMute = field.tagName === "IMG" && field.hasAttribute("alt");  // decoration says so with an empty text
    const label = field.labels?.[0]?.innerText.trim();
    const named = field.getAttribute("aria-label") || field.innerText?.trim() || label || field.alt || isMute;
    if (!named) bad.push(`no name: ${field.outerHTML.slice(0, 80)}`);
  }
  const main = document.getElementById("main");
  if (main.scrollWidth > main.clientWidth) bad.push(`wider than the window by ${main.scrollWidth - main.clientWidth}`);
  return bad;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_can_be_read_in_light_and_dark_on_a_desk_and_a_phone(
    few: ServedLab, visit: Visit, theme: str, width: int
) -> None:
    page = visit(few.url)
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    settled = {
        "runs": ".trow", "curves": ".panel[data-points]", "run": "table.config", "compare": "#judge",
        "health": ".finding", "samples": ".spectrogram[data-ready]",
    }  # fmt: skip
    assert page.evaluate(AUDIT, 22) != []  # it looks at something: no two colours differ by more than 21
    for to in PAGES:
        go(page, few, to).locator(settled[to.split("?")[0].split("/")[0]]).first.wait_for()
        assert page.evaluate(AUDIT, 4.5) == [], to  # WCAG AA


def test_everything_keeps_to_the_policy_and_nothing_comes_from_outside(few: ServedLab, visit: Visit) -> None:
    page = visit(few.url, bypass_csp=False)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: asked.append(request.url))
    for to in PAGES:
        page.goto(f"{few.url}#/{to}")
        page.locator(f"#main[data-page={to.split('?')[0].split('/')[0]}]").wait_for()
    page.locator(".spectrogram[data-ready]").first.wait_for()
    assert said == []
    assert [url for url in asked if not url.startswith((few.url, "blob:"))] == []


def test_keys_lead_everywhere(few: ServedLab, visit: Visit) -> None:
    page = visit(few.url)
    count(page, "6 runs")
    for key, to in zip("23451", ("curves", "compare", "health", "samples", "runs")):
        page.keyboard.press(key)
        page.locator(f"#main[data-page={to}]").wait_for()
    count(page, "6 runs")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.className") == "filter"
    page.keyboard.type("?")  # in a field a key is a letter
    assert page.input_value(".filter") == "?"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    page.keyboard.press("t")
    assert page.get_attribute("html", "data-theme") == "light"


def test_an_empty_lab_names_the_next_command(tmp_path: Path, visit: Visit, browser: Any) -> None:
    (tmp_path / "runs").mkdir()
    served = ServedLab(tmp_path / "runs")
    page = visit(served.url)
    for to in ("runs", "curves", "compare", "health", "samples"):
        go(page, served, to)
        page.locator(".empty .command", has_text="rung train").wait_for()
    served.stop()
    page.click("#nav a:text-is('Runs')")
    page.locator(".empty", has_text="does not answer").locator("code", has_text="rung serve").wait_for()


def test_a_copy_of_the_book_shows_the_same_without_a_server(few: ServedLab, tmp_path: Path, visit: Visit) -> None:
    root = tmp_path / "lab" / "runs"
    shutil.copytree(few.app.state.lab.book.root / "piano", root / "piano")
    export(root, tmp_path / "copy", STATIC, lambda *_: None)
    handler = partial(_Quiet, directory=str(tmp_path / "copy"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        page = visit(url)
        count(page, "5 runs")
        page.fill(".filter", "status=diverged")
        count(page, "1 of 5")
        page.goto(f"{url}#/curves?runs=piano/1,piano/2&metrics=loss")
        page.locator(".panel[data-metric=loss][data-points='400']").wait_for()
        page.goto(f"{url}#/health/piano/5")
        page.locator(".finding[data-rule=N1]").wait_for()
        page.goto(f"{url}#/compare?a=piano/1&b=piano/2")
        page.locator("tr[data-kind='the change']").wait_for()
        page.goto(f"{url}#/samples?runs=piano/1")
        page.locator(".spectrogram[data-ready]").wait_for()
        page.goto(f"{url}#/run/piano/1")
        page.locator(".notes strong").wait_for()
        assert page.locator("form, textarea").count() == 0
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass
