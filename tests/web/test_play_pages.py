"""If this fails, a visitor of `rung play` types, plays or speaks, and sees or hears something else than the answer."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mido
import numpy as np
import pytest

from tests.web.conftest import FLAGS
from tests.web.players import ANSWER, RATE, FakeMusic, FakePiano, FakeSpeech
from tests.web.textual import ServedText, player

Page = Any  # of playwright, which is optional
Visit = Callable[..., Page]

# Between the page and the loudspeaker: when there is sound, on the clock of the audio thread.
TAP = """
  window.heard = [];
  const code = `registerProcessor("tap", class extends AudioWorkletProcessor {
    process([input]) {
      let peak = 0;
      for (const channel of input) for (const value of channel) peak = Math.max(peak, Math.abs(value));
      this.port.postMessage([currentTime, peak]);
      return true;
    }
  })`;
  const connect = AudioNode.prototype.connect;
  const Own = window.AudioContext;
  window.AudioContext = class extends Own {
    constructor(...options) {
      super(...options);
      window.context = this;
      this.pending = [];
      const url = URL.createObjectURL(new Blob([code], {type: "text/javascript"}));
      this.audioWorklet.addModule(url).then(() => {
        this.tap = new AudioWorkletNode(this, "tap");
        this.tap.port.onmessage = (event) => window.heard.push(event.data);
        connect.call(this.tap, this.destination);
        for (const node of this.pending) connect.call(node, this.tap);
      });
    }
  };
  AudioNode.prototype.connect = function (to, ...rest) {
    if (to === this.context.destination && this.context.pending !== undefined) {
      if (this.context.tap) connect.call(this, this.context.tap); else this.context.pending.push(this);
    }
    return connect.call(this, to, ...rest);
  };
"""
# A MIDI keyboard; no headless browser has one. `send` is a message of it.
MIDI = """
  const input = {name: "Stub 88", onmidimessage: null};
  navigator.requestMIDIAccess = async () => {
    window.numAsked = (window.numAsked ?? 0) + 1;
    return {inputs: new Map([["1", input]]), onstatechange: null};
  };
  window.send = (...data) => input.onmidimessage(new MIDIMessageEvent("midimessage", {data: new Uint8Array(data)}));
"""


@pytest.fixture
def serve() -> Iterator[Callable[..., ServedText]]:
    made: list[ServedText] = []

    def call(**players: Any) -> ServedText:
        made.append(ServedText(players))
        return made[-1]

    yield call
    for one in made:
        one.stop()


def ready(page: Page) -> None:
    page.locator("#status[data-state=live]").wait_for()


# Text


def test_text_is_continued_beside_another_with_the_same_seed(serve: Callable[..., ServedText], visit: Visit) -> None:
    served = serve(one=player(), same=player(), other=player(seed=1))
    page = visit(f"{served.url}?num_tokens=12&seed=6", bypass_csp=False)
    ready(page)
    page.fill("#prompt", "To be <b>")
    page.keyboard.press("Control+Enter")
    for column in range(3):
        page.locator(".answer[data-state=done]").nth(column).wait_for()
    one, same, other = (page.locator(".words").nth(column).text_content() for column in range(3))
    assert one == same != other
    assert one.startswith("To be <b>")
    assert page.locator(".words b").count() == 0
    request = {"prompt": "To be <b>", "num_tokens": 12, "seed": 6, "top_p": 0.95}
    pieces = list(player().answer(player().Request(**request)))
    assert one == "To be <b>" + "".join(piece.get("text", "") for piece in pieces)


def test_a_token_shows_what_else_could_have_come_and_goes_on_from_it(
    serve: Callable[..., ServedText], visit: Visit
) -> None:
    page = visit(f"{serve(one=player()).url}?num_tokens=6&seed=5&temperature=0")
    ready(page)
    page.fill("#prompt", "abc")
    page.click("#go")
    page.locator(".note", has_text="6 tokens").wait_for()
    made = list(player().answer(player().Request(prompt="abc", num_tokens=6, temperature=0, alternatives=10)))[1:-1]
    tokens = page.locator(".token")
    third = int(tokens.nth(2).get_attribute("data-at"))
    tokens.nth(2).focus()
    shares = page.locator("#alternatives output").all_text_contents()
    expected = [100 * float(np.exp(value)) for _, _, value, _ in made[third]["alternatives"]]
    assert [float(share.split()[0]) for share in shares] == pytest.approx(expected, abs=0.006)
    before = [token.text_content() for token in tokens.all()[:2]]
    page.keyboard.press("Enter")  # to the alternatives
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.token').length !== 6")
    page.locator("#status[data-state=live]").wait_for()
    assert [token.text_content() for token in tokens.all()[:2]] == before
    id = made[third]["alternatives"][1][0]
    ids = [piece["id"] for piece in made[:third]] + [id]
    rest = list(player().answer(player().Request(prompt="abc", then=ids, num_tokens=6, temperature=0)))[1:-1]
    page.wait_for_function(f"document.querySelectorAll('.token').length === {third + 1 + len(rest)}")


def test_prompts_are_kept_in_the_browser(serve: Callable[..., ServedText], visit: Visit) -> None:
    page = visit(f"{serve(one=player()).url}?num_tokens=2")
    ready(page)
    page.fill("#prompt", "remember me")
    page.click("#go")
    page.locator(".answer[data-state=done]").wait_for()
    page.reload()
    ready(page)
    page.select_option("#prompts", "remember me")
    assert page.input_value("#prompt") == "remember me"
    page.click("#forget")
    assert "remember me" not in page.locator("#prompts option").all_text_contents()


def test_typing_begins_it_and_stopping_ends_it_and_what_was_to_begin(
    serve: Callable[..., ServedText], visit: Visit
) -> None:
    page = visit(f"{serve(one=player()).url}?num_tokens=4096&seed=3")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "answer" in request.url else None)
    ready(page)
    page.clock.install()
    page.check("#live")
    page.focus("#prompt")
    page.keyboard.type("a")
    page.clock.run_for(600)
    page.locator(".token").nth(3).wait_for(state="attached")  # half a character is not to be seen
    page.keyboard.type("b")
    page.keyboard.press("Escape")
    page.locator(".note", has_text="stopped").wait_for()
    page.clock.run_for(2000)
    assert len(asked) == 1
    assert page.is_disabled("#stop")
    assert page.text_content("#status") == "Stopped"


def test_a_mistake_is_said_on_the_page(serve: Callable[..., ServedText], visit: Visit) -> None:
    from rung.data.tokenizer import Characters

    page = visit(serve(one=player(Characters("abc"))).url)
    ready(page)
    page.fill("#prompt", "abcd")
    page.click("#go")
    page.locator("#message", has_text="not among the 3 characters").wait_for()


# Piano


def test_keys_of_the_computer_are_played_on_and_heard_in_step(serve: Callable[..., ServedText], visit: Visit) -> None:
    piano = FakePiano()
    page = visit("about:blank")
    page.add_init_script(TAP)
    page.goto(f"{serve(one=piano).url}?seed=1")
    ready(page)
    page.uncheck("#auto")
    page.evaluate(
        """() => {
          const roll = document.getElementById("roll");
          window.seen = [];
          new MutationObserver(() => {
            const down = [...document.querySelectorAll("[data-key][aria-pressed=true]")];
            const keys = down.map((key) => Number(key.dataset.key));
            if (roll.dataset.playing === "true") window.seen.push([context.currentTime, Number(roll.dataset.at), keys]);
          }).observe(roll, {attributes: true, attributeFilter: ["data-at"]});
        }"""
    )
    for key in ("z", "v"):  # the C below the middle one, and its F
        page.keyboard.down(key)
        assert page.locator("[data-key][aria-pressed=true]").count() == 1
        page.keyboard.up(key)
    page.wait_for_function("window.context.tap !== undefined && window.heard.some(([, peak]) => peak > 0.02)")
    page.wait_for_function("window.heard.length > 20 && window.heard.slice(-20).every(([, peak]) => peak < 1e-3)")
    silent_at = page.evaluate("context.currentTime")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('roll').dataset.playing === 'true'")
    page.wait_for_function("document.getElementById('roll').dataset.playing === 'false'")
    (asked,) = piano.asked
    assert [note[2] for note in asked.notes] == [48, 53]
    assert all(end > start for start, end, _, _ in asked.notes)
    assert page.get_attribute("#roll", "data-made") == "3"
    heard, seen = page.evaluate("[window.heard, window.seen]")
    latency = page.evaluate("context.outputLatency || 0")
    heard = [(time, peak) for time, peak in heard if time > silent_at]
    assert max(peak for _, peak in heard) > 0.03
    began = float(np.median([time - at for time, at, _ in seen])) - latency  # of the roll, on the clock of the sound
    onsets = [time - began for (time, peak), (_, before) in zip(heard[1:], heard) if peak > 2e-3 >= before]
    for start, end, key, _ in ANSWER:
        assert min(abs(onset - start) for onset in onsets) < 0.05, (onsets, start)
        showing = [keys for _, at, keys in seen if start < at < end]
        assert all(keys == [key] for keys in showing)
    with page.expect_download() as download:
        page.click("#save")
    assert download.value.suggested_filename == "one-at-step-7.mid"
    file = mido.MidiFile(file=io.BytesIO(download.value.path().read_bytes()))
    struck = [message.note for message in file if message.type == "note_on" and message.velocity]
    assert struck == [note[2] for note in ANSWER]


def test_a_midi_keyboard_is_asked_for_on_a_click_and_played(serve: Callable[..., ServedText], visit: Visit) -> None:
    piano = FakePiano(tasks=True)
    page = visit("about:blank")
    page.add_init_script(MIDI)
    page.goto(f"{serve(one=piano).url}?seed=7&temperature=0.73")
    ready(page)
    assert page.evaluate("window.numAsked") is None
    page.click("#midi")
    page.locator("#midi", has_text="Stub 88").wait_for()
    page.select_option("#task", "top_line")
    page.evaluate("send(0x90, 60, 100); send(0x90, 64, 30)")
    assert page.locator("[data-key][aria-pressed=true]").count() == 2
    page.evaluate("send(0xb0, 64, 127); send(0x80, 60, 0); send(0x90, 64, 0)")  # with the pedal down they sound on
    assert page.locator("[data-key][aria-pressed=true]").count() == 2
    page.evaluate("send(0xb0, 64, 0)")
    assert page.locator("[data-key][aria-pressed=true]").count() == 0
    page.locator("#roll[data-made='3']").wait_for()  # after a pause, by itself
    (asked,) = piano.asked
    assert [(key, velocity) for _, _, key, velocity in asked.notes] == [(60, 100), (64, 30)]
    assert (asked.task, asked.parameters, asked.temperature, asked.seed) == ("top_line", [], 0.73, 7)


def test_the_list_of_keys_is_no_note_and_a_key_that_was_left_down_plays_again(
    serve: Callable[..., ServedText], visit: Visit
) -> None:
    page = visit(serve(one=FakePiano()).url)
    ready(page)
    press = "dispatchEvent(new KeyboardEvent('keydown', {code: 'KeyZ', key: 'z'}))"
    page.evaluate(press)
    assert page.locator("[data-key][aria-pressed=true]").count() == 1
    page.evaluate("dispatchEvent(new Event('blur'))")  # the key is lifted while another window is in front
    assert page.locator("[data-key][aria-pressed=true]").count() == 0
    page.evaluate(press)
    assert page.locator("[data-key][aria-pressed=true]").count() == 1
    page.evaluate("dispatchEvent(new Event('blur'))")
    page.click("#go")
    page.locator("#roll[data-made='3']").wait_for()
    page.keyboard.press("Shift+Slash")
    page.locator("#help[open]").wait_for()
    assert page.get_attribute("#roll", "data-state") == "answered"


# Music


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Half a second of 440 Hz in stereo, at another rate than the model's."""
    time = np.arange(22050) / 44100
    sound = np.stack([np.sin(2 * np.pi * 440 * time)] * 2, axis=1) * 0.5
    path = tmp_path / "clip <b>.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(44100)
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    return path


def test_a_prompt_and_a_clip_become_a_clip(serve: Callable[..., ServedText], visit: Visit, clip: Path) -> None:
    music = FakeMusic()
    page = visit(serve(one=music, two=FakeMusic()).url, bypass_csp=False)
    ready(page)
    page.set_input_files("#file", str(clip))
    page.locator("#given .clip[data-seconds='0.500']").wait_for()
    page.fill("#prompt", "abcd")
    page.click("#go")
    page.locator("#clips .clip[data-seconds='1.500']").nth(1).wait_for()
    (asked,) = music.asked
    heard = np.frombuffer(asked.sound, "<i2").astype(np.float32) / 32768
    assert len(heard) == RATE // 2
    assert np.abs(np.fft.rfft(heard)).argmax() == 220  # 440 Hz in half a second
    assert float(np.sqrt((heard**2).mean())) == pytest.approx(0.5 / np.sqrt(2), rel=0.02)
    assert page.locator(".note b").count() == 0
    # The picture has its bright line where the tone is.
    columns = page.evaluate(
        """() => {
          const canvas = document.querySelector("#clips .spectrogram"), {width, height} = canvas;
          const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
          const bright = (x) => {
            const at = (y) => 4 * (y * width + x), rows = Array.from({length: height}, (_, y) => y);
            const sums = rows.map((y) => data[at(y)] + data[at(y) + 1]);
            return height - sums.indexOf(Math.max(...sums));
          };
          return [bright(Math.floor(width / 6)), bright(Math.floor(width * 2 / 3))];
        }"""
    )
    assert 0 <= columns[0] - columns[1] <= 6  # 440 Hz, then 400 Hz
    with page.expect_download() as download:
        page.locator("#clips .clip button").first.click()
    with wave.open(str(download.value.path())) as file:
        assert (file.getframerate(), file.getnframes()) == (RATE, 3 * RATE // 2)


def test_of_a_long_clip_the_end_is_continued(serve: Callable[..., ServedText], visit: Visit, tmp_path: Path) -> None:
    music, path = FakeMusic(), tmp_path / "long.wav"
    sound = np.zeros(62 * 8000, "<i2")
    sound[-8000:] = 16000 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(sound.tobytes())
    page = visit(serve(one=music).url, bypass_csp=False)
    ready(page)
    page.set_input_files("#file", str(path))
    page.locator("#given .clip[data-seconds='60.000']").wait_for()
    page.click("#go")
    page.locator("#clips .clip").wait_for()
    heard = np.frombuffer(music.asked[0].sound, "<i2")
    assert len(heard) == 60 * RATE
    assert np.abs(heard[: 58 * RATE]).max() < 100
    assert np.abs(np.fft.rfft(heard[-RATE // 2 :])).argmax() == 220


# Speech


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seconds of a tone of 300 Hz, for the microphone."""
    path = tmp_path_factory.mktemp("spoken") / "voice.wav"
    sound = 0.2 * np.sin(2 * np.pi * 300 * np.arange(2 * RATE) / RATE)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    return path


def test_what_is_recorded_is_heard_as_it_is(serve: Callable[..., ServedText], browser: Any, spoken: Path) -> None:
    speech = FakeSpeech()
    served = serve(one=speech)
    launched = browser.browser_type.launch(
        executable_path=browser.rung_path,
        args=[
            *FLAGS, "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
            f"--use-file-for-fake-audio-capture={spoken}",
        ],
    )  # fmt: skip
    try:
        page = launched.new_context().new_page()
        page.goto(served.url)
        ready(page)
        page.fill("#question", "who?")
        page.click("h1")  # the focus leaves the question
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("r")
        page.locator("#seconds", has_text="1.").wait_for()
        page.keyboard.press("r")
        page.locator(".said[data-task=asr]", has_text="seconds").wait_for()
        page.locator(".said[data-task=qa]").wait_for()
        assert page.locator(".said[data-task=qa]").text_content() == "<i>who?</i>"
    finally:
        launched.close()
    (heard,) = speech.heard
    assert len(heard) >= RATE
    second = heard[-RATE // 2 :]
    assert np.abs(np.fft.rfft(second)).argmax() == pytest.approx(150, abs=1)  # 300 Hz in half a second
    assert float(np.sqrt((second**2).mean())) == pytest.approx(0.2 / np.sqrt(2), rel=0.1)  # no gain control


def test_a_dropped_clip_is_answered_at_once(serve: Callable[..., ServedText], visit: Visit, clip: Path) -> None:
    speech = FakeSpeech()
    page = visit(serve(one=speech).url, bypass_csp=False)
    ready(page)
    page.set_input_files("#file", str(clip))
    page.locator(".said", has_text="0.5 seconds").wait_for()
    assert len(speech.heard[0]) == RATE // 2
    page.set_input_files("#file", {"name": "x.wav", "mimeType": "audio/wav", "buffer": b"no sound"})
    page.locator("#message", has_text="cannot read this file as sound").wait_for()


def test_two_clicks_open_the_microphone_once_and_a_failure_closes_it(
    serve: Callable[..., ServedText], visit: Visit
) -> None:
    page = visit("about:blank")
    page.add_init_script("""
      window.opened = [];
      navigator.mediaDevices.getUserMedia = () => new Promise((done) => window.allow = () => {
        const stream = new AudioContext().createMediaStreamDestination().stream;
        window.opened.push(stream);
        done(stream);
      });
      AudioWorklet.prototype.addModule = () => Promise.reject(new Error("no module"));
    """)
    page.goto(serve(one=FakeSpeech()).url)
    ready(page)
    page.click("#record")
    page.evaluate("void (window.first = window.allow)")
    page.click("#record")
    assert page.evaluate("window.first === window.allow")
    page.evaluate("window.allow()")
    page.locator("#message", has_text="no module").wait_for()
    assert page.evaluate("opened.map((one) => one.getTracks().map((track) => track.readyState))") == [["ended"]]


# All of them


@pytest.mark.parametrize("kind", ["text", "piano", "music", "speech"])
def test_a_page_fits_a_phone_and_names_what_it_shows(serve: Callable[..., ServedText], visit: Visit, kind: str) -> None:
    made = {"text": player, "piano": FakePiano, "music": FakeMusic, "speech": FakeSpeech}[kind]()  # type: ignore[operator]
    page = visit(serve(one=made).url)
    page.set_viewport_size({"width": 390, "height": 844})
    ready(page)
    assert page.text_content("h1") == "one at step 7"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, canvas, section, audio")]
          .filter((one) => !(one.textContent.trim() || one.labels?.length))
          .filter((one) => !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby")))
          .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    page.keyboard.press("Escape")
    page.click("#help-open")
    page.locator("#help[open] kbd").first.wait_for()
    page.keyboard.press("Escape")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    assert "theme=dark" in page.url


def test_requests_are_checked_and_limited(serve: Callable[..., ServedText], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.web.test_endpoint import call

    served = serve(one=FakePiano())
    about = call(served, "/about", method="GET").data
    assert (about["kind"], about["runs"][0]["name"]) == ("piano", "one")
    for body in (b"{", {"notes": 1}, {"temperature": -1}, {"notes": [[0, 1, 200, 3]]}, {"path": "/etc/passwd"}):
        answer = call(served, "/answer/0", body)
        assert (answer.status, answer.data["code"]) == (400, "bad-request")
    assert call(served, "/answer/1", {}).status == 404
    assert call(served, "/answer/0", {}, Origin="http://evil.example").status == 403
    monkeypatch.setattr("rung.web.answers.MOST_REQUEST_BYTES", 1000)
    answer = call(served, "/answer/0", {"task": "x" * 2000})
    assert (answer.status, answer.data["code"]) == (413, "too-large")
    good = call(served, "/answer/0", {"notes": [[0, 1, 60, 80]]})
    assert json.loads(good.data)["caption"] == "1 notes given"


def test_runs_beside_each_other_need_not_have_learned_the_same(serve: Callable[..., ServedText], visit: Visit) -> None:
    tasks, plain = FakePiano(tasks=True), FakePiano()
    page = visit(serve(one=tasks, two=plain).url)
    ready(page)
    page.select_option("#task", "top_line")
    page.uncheck("#auto")
    page.keyboard.press("z")
    page.keyboard.press("Enter")
    page.locator("#takes button").nth(1).wait_for()
    assert (tasks.asked[0].task, plain.asked[0].task) == ("top_line", "")
    assert tasks.asked[0].seed == plain.asked[0].seed
    page.locator("#takes button").nth(1).click()
    assert [button.get_attribute("aria-pressed") for button in page.locator("#takes button").all()] == ["false", "true"]
