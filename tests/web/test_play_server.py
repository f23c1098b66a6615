"""If this fails, visitors of `rung play` mix, lose their walk with the connection, or a foreign page can drive it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import UserError
from rung.recipe import View
from rung.web.serve import ImpatientProtocol
from tests.web.fake import HEIGHT, LIMIT, PLACES, WIDTH, WRONG, FakePlayer, FakeWalk, Served

pytest.importorskip("websockets")
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

Answer = tuple[dict[str, Any], dict[str, np.ndarray]]


class Visitor:
    """Speaks the page's side of the protocol, and takes answers apart by itself."""

    def __init__(self, served: Served, name: str = "", origin: str | None = None) -> None:
        address = f"ws://127.0.0.1:{served.port}/walk?visit={name}"
        self.socket: ClientConnection = contextlib.ExitStack().enter_context(connect(address, origin=origin))
        self.hello = json.loads(self.socket.recv())

    def ask(self, walk: int = 0, place: int = 0, **more: Any) -> Answer:
        self.socket.send(json.dumps({"walk": walk, "place": place, **more}))
        return self.take()

    def take(self) -> Answer:
        data = self.socket.recv()
        assert isinstance(data, bytes), data
        (length,) = struct.unpack("<I", data[:4])
        head, rest, frames = json.loads(data[4 : 4 + length]), data[4 + length :], {}
        for name, size in head.get("pictures", []):
            frames[name] = np.frombuffer(rest[:size], np.uint8)
            rest = rest[size:]
        assert rest == b""
        return head, frames

    def red(self, **request: Any) -> int:
        return int(self.ask(**request)[1]["dream"].reshape(HEIGHT, WIDTH, 3)[0, 0, 0])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served(FakePlayer())
    yield made
    made.stop()


def test_an_intent_moves_the_dream(served: Served) -> None:
    visitor = Visitor(served)
    reds = [visitor.red(intent={"forward": 1}) for _ in range(5)]
    assert reds == [WRONG + 1 + n for n in range(5)]


def test_a_request_that_is_never_finished_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "request_s", 0.05)
    body = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab"
    for half in (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", body):
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as visitor:
            visitor.sendall(half)
            while visitor.recv(4096):  # the answer to half a body may come first; then the end, or TimeoutError
                pass
    # A whole request, a second one on the same connection, and a walk are served all the same.
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as visitor:
        visitor.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert visitor.recv(12) == b"HTTP/1.1 200"
    assert Visitor(served).red(intent={"forward": 1}) == WRONG + 1


def test_two_visitors_do_not_mix(served: Served) -> None:
    one, two = Visitor(served), Visitor(served)
    for _ in range(3):
        one.ask(intent={"forward": 1})
        two.ask(place=2, intent={"turn": 1})
    assert one.hello["visit"] != two.hello["visit"]
    assert one.ask()[1]["dream"][:3].tolist() == [WRONG + 3, 100, 0]
    assert two.ask(place=2)[1]["dream"][:3].tolist() == [WRONG, 103, 120]


def test_a_lost_visitor_goes_on_where_they_were(served: Served) -> None:
    visitor = Visitor(served)
    assert visitor.hello["is_known"] is False
    for _ in range(4):
        visitor.ask(intent={"forward": 1})
    served.cut()
    with pytest.raises(ConnectionClosed):
        visitor.socket.recv()
    back = Visitor(served, visitor.hello["visit"])
    assert back.hello["is_known"] is True
    assert back.red(intent={"forward": 1}) == WRONG + 5


def test_a_visitor_can_be_back_before_the_loss_was_noticed(served: Served) -> None:
    first = Visitor(served)
    first.ask(intent={"forward": 1})
    second = Visitor(served, first.hello["visit"])
    first.socket.close()
    assert second.red(intent={"forward": 1}) == WRONG + 2
    third = Visitor(served, first.hello["visit"])
    assert third.hello["is_known"] is True


def test_a_forgotten_walk_begins_again_at_its_place() -> None:
    served = Served(FakePlayer(), keep_s=0)
    visitor = Visitor(served)
    visitor.ask(walk=3, place=2, offset=5, intent={"forward": 1})
    visitor.socket.close()
    back = Visitor(served, visitor.hello["visit"])  # the server has read the close before it accepts anything new
    while back.hello["is_known"]:
        back.socket.close()
        back = Visitor(served, visitor.hello["visit"])
    head, frames = back.ask(walk=3, place=2, offset=5, intent={"forward": 1})
    assert (head["step"], frames["dream"][:3].tolist()) == (1, [WRONG + 6, 100, 120])
    served.stop()


def test_a_new_number_begins_a_new_walk(served: Served) -> None:
    visitor = Visitor(served)
    visitor.ask(walk=0, intent={"forward": 1})
    head, frames = visitor.ask(walk=1, place=1, offset=3)
    assert (head["walk"], head["step"], head["place"], head["offset"]) == (1, 1, 1, 3)
    assert frames["dream"][:3].tolist() == [WRONG + 3, 100, 60]


def test_what_was_clamped_is_flagged(served: Served) -> None:
    visitor = Visitor(served)
    head, _ = visitor.ask(intent={"forward": 3, "turn": -1})
    assert head["wanted"] == [3, 0, -1, 0, 0.1]
    assert head["given"] == [LIMIT, 0, -1, 0, 0.1]
    assert head["clamped"] == [True, False, False, False, False]


def test_a_recording_is_followed_to_its_end(served: Served) -> None:
    visitor = Visitor(served)
    length = PLACES[1]["length"]
    for step in range(1, length + 1):
        head, frames = visitor.ask(place=1, mode="follow")
        assert (head["step"], head["offset"]) == (step, step)
        assert frames["real"][:3].tolist() == [step, 100, 60]
        assert frames["dream"][:3].tolist() == [step + WRONG, 100, 60]
    for _ in range(2):
        head, frames = visitor.ask(place=1, mode="follow")
        assert head["is_end"] is True
        assert frames == {}


def test_following_after_a_walk_goes_back_to_the_path(served: Served) -> None:
    visitor = Visitor(served)
    visitor.ask(mode="follow")
    visitor.ask(mode="follow")
    _, frames = visitor.ask(intent={"forward": 1})  # off the path, from where it had led
    assert list(frames) == ["dream"]
    assert frames["dream"][0] == WRONG + 3
    head, frames = visitor.ask(mode="follow")
    assert head["offset"] == 3
    assert frames["real"][0] == 3


def test_jpeg_looks_like_the_frame(served: Served) -> None:
    import io

    from PIL import Image

    head, frames = Visitor(served).ask(coding="jpeg")
    shown = np.asarray(Image.open(io.BytesIO(frames["dream"].tobytes())))
    assert (head["coding"], shown.shape) == ("jpeg", (HEIGHT, WIDTH, 3))
    assert np.abs(shown.astype(int) - [WRONG, 100, 0]).max() <= 3


BAD = [
    ("", "bad-request", ""),
    ("{", "bad-request", ""),
    ("[1]", "bad-request", ""),
    ('{"walk": 0}', "bad-request", "place"),
    ('{"walk": 0, "place": 3}', "no-place", "3"),
    ('{"walk": 0, "place": -1}', "no-place", "-1"),
    ('{"walk": 0, "place": 1, "offset": 6}', "bad-range", "5"),
    ('{"walk": 0, "place": 0, "mode": "fly"}', "bad-request", "fly"),
    ('{"walk": 0, "place": 0, "intent": {"fly": 1}}', "no-intent", "forward, right, turn, look"),
    ('{"walk": 0, "place": 0, "intent": {"forward": NaN}}', "bad-request", ""),
    ('{"walk": 0, "place": 0, "intent": {"forward": 1e999}}', "bad-request", ""),
    ('{"walk": 0, "place": 0, "speed": 2}', "bad-request", "speed"),
]


@pytest.mark.parametrize(("text", "code", "value"), BAD, ids=[text for text, _, _ in BAD])
def test_a_bad_request_is_answered_with_a_sentence_and_changes_nothing(
    served: Served, text: str, code: str, value: str
) -> None:
    visitor = Visitor(served)
    visitor.ask(intent={"forward": 1})
    for message in (text, text.encode()):  # as text and as a binary message
        visitor.socket.send(message)
        answer = json.loads(visitor.socket.recv())
        assert answer["code"] == code
        assert value in answer["error"]
    assert visitor.red() == WRONG + 1


@given(st.text() | st.binary())
def test_no_text_at_all_gets_past_the_parser_as_an_exception(text: str | bytes) -> None:
    from rung.web.walk import parse

    with pytest.raises(UserError):
        parse(text, FakePlayer().about())


def test_the_model_is_entered_by_one_thread_at_a_time() -> None:
    player = FakePlayer()
    served = Served(player)
    visitors = [Visitor(served) for _ in range(4)]
    for _ in range(10):
        for visitor in visitors:
            visitor.socket.send('{"walk": 0, "place": 0, "intent": {"forward": 1}}')
        heads = [visitor.take()[0] for visitor in visitors]
    assert [head["step"] for head in heads] == [10] * 4
    assert player.most_inside == 1
    served.stop()


def test_a_visitor_who_asks_much_does_not_keep_another_waiting() -> None:
    """The greedy one has asked a hundred times; the model is free again only when the test says so."""
    gate, entered, order = threading.Semaphore(0), threading.Semaphore(0), []

    class Slow(FakeWalk):
        def step(self, intent: Mapping[str, float]) -> View:
            order.append(self.place)
            entered.release()
            gate.acquire()
            return super().step(intent)

    class SlowPlayer(FakePlayer):
        def walk(self, place: int, offset: int = 0) -> FakeWalk:
            return Slow(place, offset)

    served = Served(SlowPlayer())
    greedy, modest = Visitor(served), Visitor(served)
    for _ in range(100):
        greedy.socket.send('{"walk": 0, "place": 0}')
    entered.acquire()
    modest.socket.send('{"walk": 0, "place": 1}')
    while 1 not in order:
        gate.release()
        entered.acquire()
    assert order.count(0) < 100
    for _ in range(101):
        gate.release()
    modest.take()
    served.stop()


def test_a_failing_model_is_named_and_ends_the_visit(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakePlayer):
        def walk(self, place: int, offset: int = 0) -> FakeWalk:
            raise RuntimeError("out of memory")

    served = Served(Broken())
    visitor = Visitor(served)
    visitor.socket.send('{"walk": 0, "place": 0}')
    assert json.loads(visitor.socket.recv()) == {
        "error": "the model failed: RuntimeError: out of memory",
        "is_fatal": True,
    }
    with pytest.raises(ConnectionClosed):
        visitor.socket.recv()
    assert "out of memory" in caplog.text
    served.stop()


def status(served: Served, headers: Mapping[str, str]) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(served.url + "walk", headers=dict(headers))) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": ""},
        {"Host": "["},
    ],
    ids=str,
)
def test_foreign_pages_are_refused(served: Served, headers: dict[str, str]) -> None:
    assert status(served, headers) == 403


def test_a_foreign_page_cannot_open_the_line(served: Served) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        Visitor(served, origin="http://evil.example")
    own = f"http://127.0.0.1:{served.port}"
    assert Visitor(served, origin=own).hello["title"] == "fake/1 at step 7"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_our_own_names_are_served(served: Served, host: str) -> None:
    name = f"{host}:{served.port}"
    assert status(served, {"Host": name, "Origin": f"http://{name}"}) == 404  # no page there, but not refused


def test_a_full_house_is_said_and_the_longest_gone_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.web.walk.MOST_VISITS", 2)
    served = Served(FakePlayer())
    one, two = Visitor(served), Visitor(served)
    with connect(f"ws://127.0.0.1:{served.port}/walk") as socket, pytest.raises(ConnectionClosed, match="visitors"):
        socket.recv()
    one.socket.close()
    three = None
    while three is None:  # until the server has seen that one has left
        with contextlib.suppress(ConnectionClosed):
            three = Visitor(served)
    assert two.red() == three.red() == WRONG
    served.stop()
