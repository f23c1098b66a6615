"""If this fails, a visitor of the play page presses a key and sees nothing change, or is not told what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.web.fake import PLACES, WRONG, FakePlayer, FakeWalk, Served

Page = Any  # of playwright, which is optional
Visit = Callable[..., Page]

# The colour in the middle of a pane, where all panes have the same width and small gaps between them.
COLOUR = """(pane) => {
  const canvas = document.getElementById("picture"), names = canvas.dataset.panes.split(" ");
  const x = Math.floor(canvas.width * (names.indexOf(pane) + 0.5) / names.length), y = Math.floor(canvas.height / 3);
  return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data.slice(0, 3)];
}"""


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(FakePlayer())
    yield made
    made.stop()


def colour(page: Page, pane: str = "dream") -> list[int]:
    found: list[int] = page.evaluate(COLOUR, pane)
    return found


def wait(page: Page, what: str, *, pane: str = "dream") -> None:
    """Until `what` holds, an expression in the colours r, g, b of a pane and in `stage`, the data of the stage."""
    page.wait_for_function(
        f"""() => {{
          const stage = document.getElementById("stage").dataset;
          const names = (document.getElementById("picture").dataset.panes ?? "").split(" ");
          if (!names.includes({pane!r})) return false;
          const [r, g, b] = ({COLOUR})({pane!r});
          return {what};
        }}"""
    )


def paused(page: Page) -> None:
    """Stops the world, so that what is seen next was caused by what is pressed next."""
    page.keyboard.press("Space")
    page.wait_for_function(
        "document.getElementById('pause').getAttribute('aria-pressed') === 'true'"
        " && document.getElementById('stage').dataset.underWay === '0'"  # nor is an answer still to come
    )


def test_keys_change_the_picture(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, f"stage.step > 3 && r === {WRONG} && g === 100")
    page.keyboard.down("w")
    wait(page, f"r >= {WRONG + 5} && g === 100")
    page.keyboard.up("w")
    page.keyboard.down("ArrowRight")
    wait(page, "g >= 105")
    page.keyboard.up("ArrowRight")
    page.keyboard.down("a")
    wait(page, "g <= 95")
    page.keyboard.up("a")
    page.keyboard.down("ArrowDown")
    wait(page, f"r <= {WRONG - 5}")
    page.keyboard.up("ArrowDown")


def test_a_key_that_is_held_before_the_world_is_there_counts(served: Served, visit: Visit) -> None:
    page = visit(f"{served.url}?place=1")
    page.keyboard.down("w")
    wait(page, f"r >= {WRONG + 5}")


def test_nothing_moves_without_a_key(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 20")
    assert colour(page) == [WRONG, 100, 0]


def test_a_short_tap_between_two_views_counts(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    paused(page)
    page.keyboard.press("w")  # down and up while nothing was asked for
    page.keyboard.press(".")
    wait(page, f"r === {WRONG + 1}")


def test_dragging_turns(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    box = page.locator("#stage").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 150, y, steps=5)
    page.mouse.up()
    wait(page, "g > 100")
    page.locator("[data-name=turn] .value", has_text="0.000").wait_for()  # all of the drag has been used
    turned = colour(page)
    page.mouse.move(x, y, steps=5)  # no button: nothing turns
    step = int(page.get_attribute("#stage", "data-step"))
    wait(page, f"stage.step > {step + 5}")
    assert colour(page) == turned


def test_sideways_and_looking_reach_the_model(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    for key, channel, value in (
        ("e", "right", "1.000"),
        ("q", "right", "-1.000"),
        ("Shift+ArrowRight", "right", "1.000"),
        ("r", "look", "1.000"),
        ("PageDown", "look", "-1.000"),
    ):
        for part in key.split("+"):
            page.keyboard.down(part)
        page.locator(f"[data-name={channel}] .value", has_text=value).wait_for()
        for part in reversed(key.split("+")):
            page.keyboard.up(part)
        page.locator(f"[data-name={channel}] .value", has_text="0.000").wait_for()


def test_a_clamped_control_is_flagged(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    forward = page.locator("[data-name=forward]")
    page.keyboard.down("w")
    page.locator("[data-name=forward][data-state=fine] .value", has_text="1.000").wait_for()
    for _ in range(4):
        page.keyboard.press("+")  # to twice a brisk move; the limit is 1.25
    page.locator("[data-name=forward][data-state=clamped] .value", has_text="1.250").wait_for()
    forward.locator(".note", has_text="wanted 2.000").wait_for()
    page.locator("#clamped", has_text="clamped: forward").wait_for()
    page.keyboard.up("w")
    page.locator("[data-name=forward][data-state=fine]").wait_for()
    page.wait_for_function("document.getElementById('clamped').textContent === ''")
    assert page.get_attribute("[data-name=dt]", "data-state") == "constant"
    assert "speed=2" in page.url


def test_reset_goes_to_the_place(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    page.select_option("#place", "2")
    wait(page, f"stage.place === '2' && r === {WRONG} && b === 120")
    page.locator("#offset").fill("7")
    wait(page, f"r === {WRONG + 7} && b === 120")
    page.focus("#stage")
    page.keyboard.down("w")
    wait(page, f"r > {WRONG + 10}")
    page.keyboard.up("w")
    page.keyboard.press("Backspace")
    wait(page, f"r === {WRONG + 7} && b === 120")
    page.keyboard.press("[")
    wait(page, f"r === {WRONG} && b === 60")
    assert "place=1" in page.url


def test_the_address_says_where_one_is(served: Served, visit: Visit) -> None:
    page = visit(f"{served.url}?place=2&offset=4&speed=0.5&smooth=1&theme=dark")
    wait(page, f"r === {WRONG + 4} && b === 120")
    assert page.input_value("#speed") == "0.5"
    assert page.is_checked("#smooth")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    page.goto(f"{served.url}?place=99&offset=999&speed=fast&mode=fly")  # what does not exist is made to fit
    wait(page, f"b === 120 && r === {WRONG + PLACES[2]['length'] - 1}")


def test_the_recording_is_shown_beside_the_dream(served: Served, visit: Visit) -> None:
    page = visit(f"{served.url}?place=2&mode=follow")
    wait(page, "stage.step >= 3", pane="real")
    paused(page)
    real, dream = colour(page, "real"), colour(page, "dream")
    assert real[0] == int(page.get_attribute("#stage", "data-step"))
    assert dream == [real[0] + WRONG, *real[1:]]
    assert real[1:] == [100, 120]
    page.keyboard.press("x")
    wait(page, f"r === {3 * WRONG} && g === 0 && b === 0", pane="difference")
    assert page.get_attribute("#picture", "data-panes") == "real dream difference"


def test_a_walking_key_takes_over_from_the_recording(served: Served, visit: Visit) -> None:
    page = visit(f"{served.url}?mode=follow")
    wait(page, "stage.step >= 3", pane="real")
    page.keyboard.press("d")
    wait(page, "g === 101")
    assert page.get_attribute("#picture", "data-panes") == "dream"
    assert page.get_attribute("#mode-walk", "aria-pressed") == "true"


def test_the_end_of_the_recording_is_said(served: Served, visit: Visit) -> None:
    page = visit(f"{served.url}?mode=follow&place=1")
    page.locator("#message", has_text="The recording ends here").wait_for()
    assert colour(page, "real") == [PLACES[1]["length"], 100, 60]
    # Six frames later the message is back, sooner than a busy browser is asked again: what it said is kept in the page.
    page.evaluate(
        """() => {
          const message = document.getElementById("message");
          window.said = [];
          new MutationObserver(() => window.said.push(message.hidden ? "" : message.textContent))
            .observe(message, {attributes: true, childList: true});
        }"""
    )
    page.keyboard.press("Space")
    page.wait_for_function("window.said.includes('') && window.said.at(-1).startsWith('The recording ends here')")


def test_a_cut_connection_comes_back_and_the_walk_goes_on(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    page.keyboard.down("w")
    wait(page, f"r >= {WRONG + 10}")
    page.keyboard.up("w")
    paused(page)
    before, step = colour(page), int(page.get_attribute("#stage", "data-step"))
    page.evaluate(
        """() => {
          const status = document.getElementById("status");
          window.states = [];
          new MutationObserver(() => window.states.push(status.dataset.state)).observe(status, {attributes: true});
        }"""
    )
    served.cut()
    page.wait_for_function("window.states.includes('lost') && window.states.at(-1) === 'live'")
    page.keyboard.press(".")
    wait(page, f"stage.step > {step}")  # a walk that had begun again would count from 1
    assert colour(page) == before
    assert page.is_hidden("#message")


def test_a_restarted_server_is_found_again(served: Served, visit: Visit) -> None:
    page = visit(f"{served.url}?place=2&offset=3")
    page.keyboard.down("w")
    wait(page, f"r >= {WRONG + 10}")
    page.keyboard.up("w")
    served.stop()
    page.locator("#status[data-state=lost]").wait_for()
    again = Served(FakePlayer(), port=served.port)
    page.locator("#status[data-state=live]").wait_for()
    page.locator("#message", has_text="it begins again").wait_for()
    wait(page, f"r === {WRONG + 3} && b === 120")
    again.stop()


def test_two_visitors_do_not_mix(served: Served, visit: Visit) -> None:
    one, two = visit(served.url), visit(f"{served.url}?place=1")
    wait(one, "stage.step > 0")
    wait(two, "stage.step > 0")
    one.keyboard.down("w")
    wait(one, f"r >= {WRONG + 10}")
    one.keyboard.up("w")
    step = int(two.get_attribute("#stage", "data-step"))
    wait(two, f"stage.step > {step + 3}")
    assert colour(two) == [WRONG, 100, 60]
    assert colour(one)[1:] == [100, 0]


def test_a_clip_has_pictures_in_it(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    page.keyboard.press("c")
    page.keyboard.down("w")
    wait(page, f"r >= {WRONG + 30}")
    page.keyboard.up("w")
    with page.expect_download() as download:
        page.keyboard.press("c")
    name = download.value.suggested_filename
    assert name.startswith("fake-1-at-step-7-hall-")
    assert name.endswith(".webm")
    data = download.value.path().read_bytes()
    assert data[:4] == b"\x1a\x45\xdf\xa3"  # as every Matroska file begins
    assert len(data) > 2000
    size = page.evaluate(
        """async (bytes) => {
          const video = document.createElement("video");
          video.src = URL.createObjectURL(new Blob([new Uint8Array(bytes)], {type: "video/webm"}));
          await new Promise((done, failed) => { video.onloadeddata = done; video.onerror = failed; });
          return [video.videoWidth, video.videoHeight];
        }""",
        list(data),
    )
    assert size == page.evaluate("() => { const c = document.getElementById('picture'); return [c.width, c.height]; }")


def test_a_still_is_saved(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    with page.expect_download() as download:
        page.keyboard.press("p")
    assert download.value.path().read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_everything_can_be_reached_by_keyboard(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    page.keyboard.press("h")
    page.locator("#help[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("#help[open]").wait_for(state="hidden")
    wanted = {
        "pause",
        "again",
        "mode-walk",
        "mode-follow",
        "clip",
        "still",
        "place",
        "offset",
        "speed",
        "fast",
        "theme",
    }
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
    assert wanted <= seen
    page.focus("#speed")
    page.keyboard.press("ArrowRight")  # moves the slider, not the visitor
    assert page.input_value("#speed") == "1.25"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "stage"
    assert colour(page) == [WRONG, 100, 0]


def test_a_key_is_not_held_after_the_focus_was_lost(served: Served, visit: Visit) -> None:
    page = visit(served.url)
    wait(page, "stage.step > 0")
    page.keyboard.down("w")
    wait(page, f"r > {WRONG + 2}")
    page.evaluate("dispatchEvent(new Event('blur'))")  # another window took the focus; no keyup will come
    page.locator("[data-name=forward] .value", has_text="0.000").wait_for()


def test_jpeg_on_a_slow_line_shows_the_same(served: Served, visit: Visit) -> None:
    page = visit(f"{served.url}?compress=1&fast=1")
    page.keyboard.down("w")
    wait(page, f"r >= {WRONG + 10} && Math.abs(g - 100) <= 3")


def test_a_failing_model_is_named(visit: Visit) -> None:
    class Broken(FakePlayer):
        def walk(self, place: int, offset: int = 0) -> FakeWalk:
            raise RuntimeError("out of memory")

    served = Served(Broken())
    page = visit(served.url)
    page.locator("#message", has_text="the model failed: RuntimeError: out of memory").wait_for()
    assert page.get_attribute("#status", "data-state") == "failed"
    served.stop()


def test_the_page_keeps_its_own_policy(served: Served, visit: Visit) -> None:
    """With the content security policy in force, styles, scripts and the line still work."""
    page = visit(served.url, bypass_csp=False)
    page.locator("#status[data-state=live]").wait_for()
    page.locator("[data-name=forward] .value", has_text="0.000").wait_for()
    assert page.title() == "fake/1 at step 7"
    assert page.evaluate("getComputedStyle(document.querySelector('main')).display") == "grid"


def test_a_finger_on_a_button_walks(served: Served, browser: Any) -> None:
    context = browser.new_context(
        bypass_csp=True, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    )
    page = context.new_page()
    page.goto(served.url)
    wait(page, "stage.step > 0")
    forward = page.locator("#touch [data-code=KeyW]")
    forward.dispatch_event("pointerdown", {"pointerId": 1, "button": 0, "isPrimary": True, "bubbles": True})
    wait(page, f"r >= {WRONG + 5} && g === 100")
    page.evaluate(
        "document.querySelector('#touch [data-code=KeyW]').dispatchEvent(new PointerEvent('pointerup', {pointerId: 1}))"
    )
    page.locator("[data-name=forward] .value", has_text="0.000").wait_for()
    page.locator("#touch [data-code=KeyD]").tap()
    wait(page, "g >= 101")
    assert page.is_visible("#touch")
    context.close()


def test_a_gamepad_walks_and_turns(served: Served, visit: Visit) -> None:
    page = visit("about:blank")
    page.add_init_script(
        "window.pad = {axes: [0, 0, 0, 0], buttons: []}; navigator.getGamepads = () => [null, window.pad];"
    )
    page.goto(served.url)
    wait(page, "stage.step > 0")
    page.evaluate("window.pad.axes = [0.1, -1, 0, 0]")  # what a stick that nobody touches says, and forward
    page.locator("[data-name=forward] .value", has_text="1.000").wait_for()
    page.locator("[data-name=right] .value", has_text="0.000").wait_for()
    page.evaluate("window.pad.axes = [0, 0, -0.5, 0]")
    page.locator("[data-name=turn] .value", has_text="-0.500").wait_for()
    page.evaluate("window.pad.axes = [0, 0, 0, 0]")
    page.locator("[data-name=turn] .value", has_text="0.000").wait_for()


def test_a_world_says_where_one_begins(visit: Visit) -> None:
    class Bright(FakePlayer):
        def about(self) -> dict[str, Any]:
            return {**super().about(), "start": {"place": 2, "offset": 5}}

    served = Served(Bright())
    page = visit(served.url)
    wait(page, f"r === {WRONG + 5} && b === 120")
    page = visit(f"{served.url}?place=1")
    wait(page, f"r === {WRONG} && b === 60")
    served.stop()
