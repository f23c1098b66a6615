"""A world whose pictures say where one is, and a server for it: what the tests of the play page walk in.

The dream is one colour: red counts forward, green turns to the right, blue is 60 times the place. The recording goes
forward by one a step; the dream along it is WRONG by 20 in red.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from rung.recipe import View
from rung.web.answers import Played
from rung.web.play import play_app
from rung.web.serve import address_of, listen, server

HEIGHT, WIDTH = 12, 16
LIMIT = 1.25  # of every control but dt
WRONG = 20
INTENTS = ["forward", "right", "turn", "look"]
PLACES = [{"label": "hall", "length": 40}, {"label": "yard", "length": 6}, {"label": "roof", "length": 30}]


def colour(*rgb: float) -> np.ndarray:
    return np.full((HEIGHT, WIDTH, 3), np.clip(np.round(rgb), 0, 255), np.uint8)


class FakeWalk:
    def __init__(self, place: int, offset: int) -> None:
        self.place, self.offset = place, offset
        self.forward, self.turn = float(offset), 100.0

    def step(self, intent: Mapping[str, float]) -> View:
        wanted = np.array([intent.get(name, 0.0) for name in INTENTS])
        given = wanted.clip(-LIMIT, LIMIT)
        self.forward += given[0]
        self.turn += given[2]
        return View(self._dream(), None, [*wanted, 0.1], [*given, 0.1])

    def follow(self) -> View | None:
        if self.offset == PLACES[self.place]["length"]:
            return None
        self.offset += 1
        self.forward += 1
        controls = [1.0, 0.0, 0.0, 0.0, 0.1]
        return View(self._dream(), colour(self.forward, self.turn, 60 * self.place), controls, controls)

    def _dream(self) -> np.ndarray:
        return colour(self.forward + WRONG, self.turn, 60 * self.place)


class FakePlayer:
    """Also notices when it is entered by two threads at once, which torch must not be."""

    kind = "world"

    def __init__(self) -> None:
        self.num_inside = self.most_inside = 0

    def about(self) -> dict[str, Any]:
        moving = [{"name": name, "low": -LIMIT, "high": LIMIT, "is_constant": False} for name in INTENTS]
        controls = [*moving, {"name": "dt", "low": 0.1, "high": 0.1, "is_constant": True}]
        size = {"height": HEIGHT, "width": WIDTH, "rate_hz": 30.0}
        return {**size, "controls": controls, "intents": INTENTS, "places": PLACES}

    def walk(self, place: int, offset: int = 0) -> FakeWalk:
        player = self

        class Watched(FakeWalk):
            def step(self, intent: Mapping[str, float]) -> View:
                player.num_inside += 1
                player.most_inside = max(player.most_inside, player.num_inside)
                view = super().step(intent)
                player.num_inside -= 1
                return view

        return Watched(place, offset)


class Served:
    """A real server in a thread; `cut` breaks all connections as a lost network does, without a word."""

    def __init__(
        self, player: Any, title: str = "fake/1 at step 7", port: int = 0, keep_s: float = 60, token: str | None = None
    ) -> None:
        self.app = play_app([Played(player, "fake/1", title)], keep_s=keep_s, token=token)
        listening = listen("127.0.0.1", port)
        self.url = address_of(listening)
        self.port: int = listening.getsockname()[1]
        self.server = server(self.app)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()

    def cut(self) -> None:
        for connection in list(self.server.server_state.connections):
            loop = connection.loop
            loop.call_soon_threadsafe(connection.transport.abort)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()
