"""If this fails, controls that are a frame early or late are trained on without a word, or good ones are accused."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.recipes.world.survey.alignment import (
    LAGS,
    Alignment,
    Span,
    Sums,
    align,
    film_motion,
    frame_motion,
    half_width,
)
from tests.conftest import shared_data
from tests.recipes.world.stores import shrunk
from tests.recipes.world.synthetic import PIXELS_PER_RADIAN, film, look_at

NAMES = ("forward", "turn", "look")


def picture(yaw: float = 0, pitch: float = 0, ahead: float = 0) -> np.ndarray:
    return look_at(np.random.default_rng((0, 2)).normal(size=(3, 24, 4)), yaw, pitch, ahead, 24, 32)


@given(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1), st.floats(-4, 4))
def test_the_motion_of_a_picture_is_found(turn: float, look: float, forward: float) -> None:
    frames = np.stack([picture(), picture(turn, look, forward)])
    sideways, down, growth, roll = frame_motion([shrunk(frames, 2), frames])[0]
    scale = np.exp(0.02 * forward) / 2  # pixels of this size per pixel of the film's own, after the step ahead
    assert sideways == pytest.approx(-turn * PIXELS_PER_RADIAN * scale, abs=0.4)
    assert down == pytest.approx(look * PIXELS_PER_RADIAN * scale, abs=0.4)
    assert growth / 16 == pytest.approx(1 - np.exp(-0.02 * forward), abs=0.02)
    assert roll == pytest.approx(0, abs=0.4)


def test_a_lamp_is_not_a_movement() -> None:
    frames = np.stack([picture(), np.rint(picture() * 0.7 + 20).astype(np.uint8)])
    assert np.abs(frame_motion([shrunk(frames, 2), frames])).max() < 0.05


@cache
def white_films() -> tuple[np.ndarray, np.ndarray, tuple[Span, ...]]:
    """Motion, moves and spans of three films whose moves are new in every frame."""
    films = [film(130, seed, 24, 32) for seed in range(3)]
    spans = tuple(Span(f"film {k}", 130 * k, 130) for k in range(3))
    frames = np.concatenate([each.frames for each in films])
    return motion_of(frames, spans), np.concatenate([each.moves for each in films]), spans


@cache
def smooth_film() -> tuple[np.ndarray, np.ndarray, tuple[Span, ...]]:
    """The same of one film whose moves change slowly: each is like its neighbours (correlation about 0.9)."""
    rng = np.random.default_rng(3)
    moves = np.zeros((600, 3))
    for t in range(1, len(moves)):
        moves[t] = 0.9 * moves[t - 1] + rng.normal(size=3) * (0.15, 0.02, 0.006)
    place = np.cumsum(moves, 0)
    frames = np.stack([picture(turn, 0.3 * np.sin(look), 6 * np.sin(ahead / 6)) for ahead, turn, look in place])
    return motion_of(frames, (span := Span("smooth", 0, 600),)), moves, (span,)


def motion_of(frames: np.ndarray, spans: tuple[Span, ...]) -> np.ndarray:
    return film_motion([shrunk(frames, 2), frames], spans, lambda done: None)


def shifted(
    motion: np.ndarray, moves: np.ndarray, spans: tuple[Span, ...], shift: int, only: int | None = None
) -> Alignment:
    """What is found when controls come `shift` frames late, in all spans or in one."""
    u, is_valid = moves.copy(), np.ones(len(moves), bool)
    for k, span in enumerate(spans):
        rows = slice(span.start, span.start + span.length)
        is_valid[span.start] = False
        if only in (None, k):
            u[rows], is_valid[rows] = np.roll(moves[rows], shift, 0), np.roll(is_valid[rows], shift)
            edge = slice(rows.start, rows.start + shift) if shift > 0 else slice(rows.stop + shift, rows.stop)
            is_valid[edge] = False
    return align(motion, u, is_valid, NAMES, spans)


@pytest.mark.parametrize("shift", [-5, -2, -1, 0, 1, 2, 5])
def test_white_controls_show_their_lag(shift: int) -> None:
    found = shifted(*white_films(), shift)
    assert found.verdict == ("misaligned" if shift else "aligned")
    assert found.lag == -shift  # late controls: the picture comes before them
    assert found.agreement == 1
    assert max(found.overall) > 0.8
    assert found.half_width < 1
    assert {stretch.lag for stretch in found.stretches} == {-shift}


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_smooth_controls_show_their_lag_with_a_wide_peak(shift: int) -> None:
    found = shifted(*smooth_film(), shift)
    assert found.verdict == ("misaligned" if shift else "aligned")
    assert found.lag == -shift
    assert found.half_width > 1.5
    assert all(low <= high for low, high in zip(found.low, found.high))


@pytest.mark.parametrize("shift", [-2, 1])
def test_one_odd_film_is_named_and_the_others_are_not(shift: int) -> None:
    motion, moves, spans = white_films()
    odd = {
        stretch.label: stretch.lag
        for stretch in shifted(motion, moves, spans, shift, only=1).stretches
        if stretch.is_odd
    }
    assert odd == {"film 1": -shift}


def test_controls_of_another_film_are_seen_nowhere() -> None:
    motion, moves, spans = white_films()
    other = np.random.default_rng(9).normal(size=moves.shape)
    assert shifted(motion, other, spans, 0).verdict == "unseen"


def test_few_rows_give_no_verdict() -> None:
    motion, moves, _ = white_films()
    assert shifted(motion, moves, (Span("short", 0, 60),), 0).verdict == "short"
    assert shifted(motion, moves, tuple(Span(str(k), 8 * k, 8) for k in range(9)), 0).num_rows == 0


def test_what_is_not_valid_has_no_say() -> None:
    motion, moves, spans = white_films()
    is_valid = np.ones(len(moves), bool)
    is_valid[[span.start for span in spans]] = False
    good = align(motion, moves, is_valid, NAMES, spans)
    spoiled = moves.copy()
    is_valid[40:60] = False
    spoiled[40:60] = 1e6
    found = align(motion, spoiled, is_valid, NAMES, spans)
    assert (found.verdict, found.lag) == ("aligned", 0)
    assert max(found.overall) == pytest.approx(max(good.overall), abs=0.05)


def test_r2_is_that_of_a_plain_regression() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 4)), rng.normal(size=(50, 2)) + 3
    y[:, 0] += x @ (1, 2, 0, 0)
    design = np.column_stack([np.ones(50), x])
    left = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    wanted = 1 - (left**2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)
    sums = Sums(design.T @ design, (design.T @ y)[None], (y**2).sum(0)[None])
    assert sums.r2()[0] == pytest.approx(wanted)
    halves = Sums.over(
        [Sums(d.T @ d, (d.T @ v)[None], (v**2).sum(0)[None]) for d, v in ((design[:9], y[:9]), (design[9:], y[9:]))]
    )
    assert halves.total().r2()[0] == pytest.approx(wanted)


def test_half_width_of_a_triangle() -> None:
    assert half_width(np.maximum(0, 1 - np.abs(LAGS) / 4), 5) == pytest.approx(2)


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_a_recorded_walk_shows_its_lag(shift: int) -> None:
    """ViZDoom's yaw and pitch, held over two tics, slowly changing: a control acts between its frame and the next."""
    motion, controls, spans = recorded_walk()
    found = shifted(motion, controls, spans, shift)
    assert (found.lag, found.verdict) == (-shift, "misaligned" if shift else "aligned")
    assert max(found.channels["turn"]) > 0.6


@cache
def recorded_walk() -> tuple[np.ndarray, np.ndarray, tuple[Span, ...]]:
    image = pytest.importorskip("PIL.Image")
    folder = shared_data("world_vizdoom")
    rows = [json.loads(line) for line in (folder / "frames.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["episode"] < 3]
    frames = np.stack([np.asarray(image.open(folder / row["image"]).convert("RGB")) for row in rows])
    length = len(rows) // 3
    assert [row["t"] for row in rows] == 3 * [*range(length)]
    applied = np.array([[row["control"][k] for k in (0, 3, 4)] for row in rows])
    controls = np.roll(applied, 1, 0)  # the row of a frame has what led to it
    spans = tuple(Span(str(k), k * length, length) for k in range(3))
    return film_motion([shrunk(frames, 8), shrunk(frames, 4)], spans, lambda done: None), controls, spans
