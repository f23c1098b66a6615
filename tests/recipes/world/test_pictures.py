"""If this fails, a person looks at pictures that are not what the model saw or made, or cannot open them."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from PIL import Image

from rung.recipes.world.pictures import MARGIN, Moment, contact_sheet, film, l1, rollout_sheet
from tests.errors import raises_code

RED, BLUE, GREEN = (230, 20, 20), (20, 20, 230), (20, 200, 20)


def plain(color: tuple[int, int, int], *shape: int) -> np.ndarray:
    return np.broadcast_to(np.array(color, np.uint8), (*shape, 3)).copy()


def opened(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def area(page: np.ndarray, color: tuple[int, int, int]) -> int:
    return int((page == np.array(color)).all(-1).sum())


def moment(**changes: object) -> Moment:
    memory = [plain(BLUE, 4, 96, 128), plain(BLUE, 8, 48, 64), plain(BLUE, 16, 12, 16), plain(BLUE, 32, 3, 4)]
    base = Moment(memory, plain(BLUE, 96, 128), plain(RED, 96, 128), plain(GREEN, 96, 128), "E1M1, frame 9")
    return base._replace(**changes)


def test_a_strip_shows_every_remembered_frame_and_what_came_of_it() -> None:
    page = opened(contact_sheet([moment()]))
    assert area(page, RED) == 96 * 128
    assert area(page, GREEN) == 96 * 128
    shown = 4 * 96 * 128 + 8 * 48 * 64 + 16 * 24 * 32 + 32 * 24 * 32  # the last two are enlarged 2 and 8 times
    assert area(page, BLUE) == shown


def test_the_newest_frame_is_the_last() -> None:
    newest = plain(BLUE, 4, 96, 128)
    newest[-1] = GREEN
    page = opened(contact_sheet([moment(memory=[newest], made=plain(RED, 96, 128))]))
    columns = np.flatnonzero((page == GREEN).all(-1).any(0))
    assert columns.min() > np.flatnonzero((page == BLUE).all(-1).any(0)).max()


def test_the_difference_is_grey_and_four_times_as_strong() -> None:
    made = plain(RED, 96, 128)
    made[:48] += 10
    page = opened(contact_sheet([moment(memory=[], made=made)]))[-MARGIN - 96 : -MARGIN, -MARGIN - 128 : -MARGIN]
    assert area(page[:48], (40, 40, 40)) == 48 * 128
    assert area(page[48:], (0, 0, 0)) == 48 * 128


def test_rows_stand_below_each_other() -> None:
    one, three = opened(contact_sheet([moment()])), opened(contact_sheet([moment()] * 3))
    assert one.shape[1] == three.shape[1]
    assert area(three, RED) == 3 * area(one, RED)


@pytest.mark.parametrize("size", [(8, 10), (33, 47), (96, 128), (192, 256)])
def test_any_size_is_drawn_and_small_ones_can_be_seen(size: tuple[int, int]) -> None:
    row = Moment([plain(BLUE, 3, *size)], plain(BLUE, *size), plain(RED, *size), plain(GREEN, *size))
    page = opened(contact_sheet([row]))
    zoom = round((area(page, RED) / (size[0] * size[1])) ** 0.5)
    assert area(page, RED) == zoom**2 * size[0] * size[1]
    assert size[0] * zoom >= 96


def test_distances_are_those_of_the_loss() -> None:
    assert l1(plain((0, 0, 0), 4, 4), plain((255, 255, 255), 4, 4)) == pytest.approx(2)


def test_a_rollout_shows_the_horizons_that_are_there() -> None:
    real, made = plain(RED, 10, 96, 128), plain(GREEN, 10, 96, 128)
    page = opened(rollout_sheet(real, made, (1, 2, 4, 8, 16)))
    assert area(page, RED) == area(page, GREEN) == 4 * 96 * 128
    real[3] = BLUE  # four steps ahead
    assert area(opened(rollout_sheet(real, made, (4,))), BLUE) == 96 * 128
    taller = opened(rollout_sheet(real, made, (1, 4), last=real[0]))
    assert taller.shape[0] > opened(rollout_sheet(real, made, (1, 4))).shape[0]  # a line for copying the last frame


def test_bytes_depend_on_the_frames_alone() -> None:
    real, made = plain(RED, 5, 24, 32), plain(GREEN, 5, 24, 32)
    assert contact_sheet([moment()]) == contact_sheet([moment()])
    assert rollout_sheet(real, made, (1, 5)) == rollout_sheet(real, made, (1, 5))
    assert film(real, made, 20) == film(real, made, 20)


def flicker(num_frames: int, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Real frames that go from red to blue half-way, and dreamed ones that stay green."""
    real = plain(RED, num_frames, height, width)
    real[num_frames // 2 :] = BLUE
    return real, plain(GREEN, num_frames, height, width)


@pytest.mark.parametrize("size", [(48, 64), (33, 47), (96, 128)])
def test_a_video_has_real_left_and_dreamed_right(size: tuple[int, int]) -> None:
    av = pytest.importorskip("av")
    real, made = flicker(12, *size)
    suffix, data = film(real, made, 17.5)
    assert suffix == ".mp4"
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == pytest.approx(17.5)
        assert stream.codec_context.pix_fmt == "yuv420p"
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    check_film(frames, *size)


def test_the_same_frames_give_the_same_bytes() -> None:
    real, made = np.random.default_rng(0).integers(0, 256, (2, 64, 12, 16, 3), dtype=np.uint8)
    first = film(real, made, 20)
    for size in range(1, 6):
        used = np.ones(size * 100_003)  # memory that is handed out elsewhere must not show
        assert film(real, made, 20) == first
        del used


def check_film(frames: list[np.ndarray], height: int, width: int) -> None:
    assert len(frames) == 12
    high, wide = frames[0].shape[:2]
    assert high % 2 == wide % 2 == 0
    assert wide >= 2 * width
    assert high >= height
    for number, color in ((0, RED), (5, RED), (6, BLUE), (11, BLUE)):
        left, right = frames[number][high * 2 // 3, wide // 4], frames[number][high * 2 // 3, wide * 3 // 4]
        assert np.abs(left.astype(int) - color).max() < 25, "codecs change colours, but not so much"
        assert np.abs(right.astype(int) - GREEN).max() < 25


def test_without_pyav_it_is_an_animation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    suffix, data = film(*flicker(12, 48, 64), 20)
    assert suffix in (".webp", ".gif")
    with Image.open(io.BytesIO(data)) as image:
        frames, durations = [], []
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")))
            durations.append(image.info["duration"])
    # equal frames in a row may be kept as one, shown for longer
    assert sum(durations) == 12 * 50
    check_film([frames[0]] * 6 + [frames[-1]] * 6, 48, 64)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with raises_code("not-installed"):
        contact_sheet([moment()])


def test_films_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        film(plain(RED, 3, 8, 8), plain(RED, 4, 8, 8), 20)
