"""A learned world that can be walked in: what `rung play` shows.

A visitor's intents become controls in the units of the data, held inside the range of the training data, since the
model knows nothing outside of it. What is not asked for is at rest; roll and pitch, which are angles and not moves, are
kept by the walk. Who follows a recording gets its controls as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rung.data.store import Store
from rung.errors import UserError
from rung.random import Draw
from rung.recipe import View
from rung.recipes.world.config import Scale
from rung.recipes.world.dream import Dreamer
from rung.recipes.world.losses import gradient_energy
from rung.recipes.world.memory import Memory, push, recall, span, to_frame, to_signal
from rung.recipes.world.model import Anchor
from rung.recipes.world.stream import array_of, divisor_of

MOST_LOOKED_AT = 500  # frames, to find a good place to begin


class WorldPlayer:
    kind = "world"

    def __init__(
        self,
        dreamer: Dreamer,
        store: Store,
        scales: Sequence[Scale],
        intents: Mapping[str, tuple[int, float, float]],
        seed: int,
    ) -> None:
        self.dreamer, self.store, self.scales, self.intents, self.seed = dreamer, store, scales, intents, seed
        self.frames = store.arrays[array_of(divisor_of(store, scales))]
        self.controls = store.arrays["controls"]
        self.names: list[str] = store.info["controls"]
        statistics = store.info["statistics"]
        self.low, self.high = (np.array(statistics[name], np.float64) for name in ("low", "high"))
        self.rest = np.where(np.isin(self.names, ["dt", "valid"]), statistics["mean"], 0.0)
        self.constant = set(statistics["constant"])
        self.has_poses = store.info["control_kind"] == "pose"
        self.device = next(dreamer.world.parameters()).device
        past = span(scales)
        self.places = [r for r in store.index if r["length"] > past]  # (a walk needs a full memory to begin with)
        if not self.places:
            raise UserError(f"{store.path} has no stretch of {past + 1} frames to begin a walk in", code="too-few")
        self.past = past
        # The best place comes first, and `start` says where in it; the others stay in the order of the recording.
        best, self.start = self._best_start()
        self.places.insert(0, self.places.pop(best))

    def _best_start(self) -> tuple[int, int]:
        """The place and the offset whose last remembered frame is brightest and richest in edges.

        Right before a wall there is little to see, and a dark corner is no welcome: brightness times gradient energy.
        The last second of a recording is left out, so that one can follow it for a while.
        """
        spans = [range(max(1, r["length"] - self.past - round(self.store.info["rate_hz"]))) for r in self.places]
        every = max(1, sum(map(len, spans)) // MOST_LOOKED_AT)
        best, found = -1.0, (0, 0)
        for place, (record, offsets) in enumerate(zip(self.places, spans)):
            if record["split"] == "unseen" and len(self.places) > 1:  # the model has never been there
                continue
            for offset in offsets[::every]:
                frame = to_signal(torch.from_numpy(np.array(self.frames[record["start"] + self.past + offset - 1])))
                score = float((frame.mean() + 1) * gradient_energy(frame[None]).mean())
                if score > best:
                    best, found = score, (place, offset)
        return found

    def about(self) -> dict[str, Any]:
        finest = self.scales[0]
        return {
            "height": finest.height,
            "width": finest.width,
            "rate_hz": float(self.store.info["rate_hz"]),
            "controls": [
                {"name": name, "low": low, "high": high, "is_constant": name in self.constant}
                for name, low, high in zip(self.names, self.low.tolist(), self.high.tolist())
            ],
            "intents": list(self.intents),
            "start": {"place": 0, "offset": self.start},
            "places": [
                {"label": f"{r['label']} ({r['split']})", "length": r["length"] - self.past} for r in self.places
            ],
        }

    def angle(self, name: str, row: int) -> float:
        """How the camera was held there, or at the next frame; on average, where neither is known."""
        channel, valid = self.names.index(name), self.names.index("valid")
        for near in self.controls[row : row + 2]:
            if near[valid]:
                return float(near[channel])
        return float(self.store.info["statistics"]["mean"][channel])

    def walk(self, place: int, offset: int = 0) -> WorldWalk:
        if not 0 <= place < len(self.places):
            raise UserError(
                f"place {place} does not exist; there are {len(self.places)}, counted from 0", code="no-place"
            )
        record = self.places[place]
        num_steps = record["length"] - self.past
        if not 0 <= offset <= num_steps:
            raise UserError(
                f"offset {offset} is outside of this place; it has {num_steps} recorded steps", code="bad-range"
            )
        begin = record["start"] + self.past + offset
        return WorldWalk(self, begin, record["start"] + record["length"])


class WorldWalk:
    """What one visitor remembers, and where on the recording the visit began."""

    def __init__(self, player: WorldPlayer, begin: int, end: int) -> None:
        self._player, self._begin, self._end = player, begin, end
        frames = torch.from_numpy(np.array(player.frames[begin - player.past : begin]))
        self._memory: Memory = recall(frames[None].to(player.device), player.scales)
        self._anchor: Anchor | None = None
        self._num_steps = 0  # made so far: each has its own noise
        self._is_on_path = True
        # Angles are no moves: from poses they are among the controls all the same, as the walk has left them.
        self._angles = {name: player.angle(name, begin - 1) for name in ("roll", "pitch")} if player.has_poses else {}

    def step(self, intent: Mapping[str, float]) -> View:
        player = self._player
        wanted = player.rest.copy()
        for name, amount in intent.items():
            if name in player.intents:
                channel, sign, brisk = player.intents[name]
                wanted[channel] += sign * brisk * amount
        given = np.clip(wanted, player.low, player.high)
        if self._angles:
            look, pitch, roll = (player.names.index(name) for name in ("look_up", "pitch", "roll"))
            wanted[roll] = given[roll] = self._angles["roll"]
            wanted[pitch] = self._angles["pitch"] + wanted[look]
            # Where the pitch ends, looking ends: a move that does not arrive was none.
            given[pitch] = np.clip(self._angles["pitch"] + given[look], player.low[pitch], player.high[pitch])
            given[look] = given[pitch] - self._angles["pitch"]
            self._angles["pitch"] = float(given[pitch])
        self._is_on_path = False
        return self._show(wanted, given)

    def follow(self) -> View | None:
        now = self._begin + self._num_steps
        if not self._is_on_path or now >= self._end:
            return None
        recorded = np.array(self._player.controls[now], np.float64)  # as they are, as in an eval
        return self._show(recorded, recorded)._replace(real=np.array(self._player.frames[now]))

    @torch.inference_mode()
    def _show(self, wanted: np.ndarray, given: np.ndarray) -> View:
        player = self._player
        controls = torch.from_numpy(given[None]).float().to(player.device)
        draw = Draw(player.seed, -1, np.array([0]))
        signal, self._anchor = player.dreamer.step(self._memory, self._anchor, controls, draw, self._num_steps)
        if not torch.isfinite(signal).all():
            raise UserError(
                "the model made a frame that is not finite; play an earlier save with --at", code="not-finite"
            )
        frame = to_frame(signal)
        self._memory = push(self._memory, frame)
        self._num_steps += 1
        return View(frame[0].cpu().numpy(), None, wanted.tolist(), given.tolist())
