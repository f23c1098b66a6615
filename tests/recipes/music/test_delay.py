"""If this fails, codes of one frame are learned as if they belonged to another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.errors import ConfigError
from rung.recipes.music.delay import DelayPattern, Specials, parse_delays, undo_delay

SPECIALS = Specials.of(16)
EOS, PAD, BOS, _ = SPECIALS

delays_of = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(lambda some: [one - min(some) for one in some])


def lay_out(codes: np.ndarray, delays: list[int], length: int | None = None, **options: bool) -> np.ndarray:
    ends = np.array([options.pop("ends", False)])
    pattern = DelayPattern(delays, len(codes), SPECIALS, **options)
    return pattern.lay_out(codes[None], np.array([len(codes) if length is None else length]), ends)[0]


def codes_of(num_frames: int, num_channels: int) -> np.ndarray:
    return np.random.default_rng(num_frames).integers(0, 16, (num_frames, num_channels)).astype(np.uint16)


@settings(max_examples=200, deadline=None)
@given(delays_of, st.integers(1, 30), st.booleans())
def test_every_code_comes_back(delays: list[int], num_frames: int, has_end: bool) -> None:
    codes = codes_of(num_frames, len(delays))
    rows = lay_out(codes, delays, has_end=has_end)
    assert rows.shape == (1 + num_frames + max(delays) + has_end, len(delays))
    assert (rows[0] == BOS).all()
    np.testing.assert_array_equal(undo_delay(rows[1:], delays, num_frames), codes)
    assert (rows < EOS).sum() == codes.size  # every code once, and nothing else
    for c, late in enumerate(delays):
        assert (rows[: 1 + late, c] == BOS).all()


@settings(max_examples=100, deadline=None)
@given(delays_of, st.integers(1, 30))
def test_the_valid_form_ends_with_the_row(delays: list[int], num_frames: int) -> None:
    codes = codes_of(num_frames, len(delays))
    rows = lay_out(codes, delays, is_full=False)
    assert len(rows) == 1 + num_frames
    assert (rows < EOS).sum() == sum(max(0, num_frames - late) for late in delays)
    assert not (rows == PAD).any()


@settings(max_examples=100, deadline=None)
@given(delays_of, st.integers(1, 20), st.integers(1, 20))
def test_the_end_is_laid_out_in_every_channel(delays: list[int], num_frames: int, length: int) -> None:
    length = min(length, num_frames)
    rows = lay_out(codes_of(num_frames, len(delays)), delays, length, ends=True)
    for c, late in enumerate(delays):
        steps = rows[1:, c]
        assert steps[length + late] == EOS
        assert (steps[length + late + 1 :] == PAD).all()
        assert (steps == EOS).sum() == 1
    cut = lay_out(codes_of(num_frames, len(delays)), delays, length, ends=False)
    assert not (cut == EOS).any()


@pytest.mark.parametrize(("num_frames", "num_channels"), [(7, 4), (12, 4), (31, 8), (3, 2)])
def test_musicgen_delays_alike(num_frames: int, num_channels: int) -> None:
    """Where it delays at all: its first column is BOS, and it needs 2 K - 1 frames."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    codes = codes_of(num_frames, num_channels)
    with_bos = torch.from_numpy(np.concatenate([np.full((1, num_channels), BOS, np.uint16), codes]).astype(np.int64))
    config = transformers.MusicgenDecoderConfig(
        vocab_size=16, num_codebooks=num_channels, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, ffn_dim=8
    )
    model = transformers.MusicgenForCausalLM(config)
    length = num_frames + num_channels
    ids, mask = model.build_delay_pattern_mask(with_bos.T.contiguous(), BOS, max_length=length)
    theirs = model.apply_delay_pattern_mask(ids, mask).numpy()
    ours = lay_out(codes, list(range(num_channels)), has_end=False).T
    ours = np.where(ours == PAD, BOS, ours)  # it has one special token for both
    assert (theirs < EOS).sum() > num_frames
    np.testing.assert_array_equal(ours[:, : theirs.shape[1]], theirs)
    np.testing.assert_array_equal(ours, mask.numpy())


@pytest.mark.parametrize("delays", [[0, 8, 9, 10], [0, 1, 2], [0, 0, 3]])
def test_dia_delays_alike(delays: list[int]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    processor = transformers.DiaProcessor
    codes = codes_of(11, len(delays))
    num_steps = len(codes) + 2 + max(delays)  # BOS and EOS
    audio = np.full((1, num_steps, len(delays)), PAD, np.int64)
    audio[0, 0], audio[0, 1:12], audio[0, 12] = BOS, codes, EOS
    indices = processor.build_indices(1, num_steps, len(delays), delays, revert=False)
    theirs = processor.apply_audio_delay(torch.from_numpy(audio), PAD, BOS, indices).numpy()[0]
    np.testing.assert_array_equal(lay_out(codes, delays, ends=True), theirs)
    back = processor.build_indices(1, num_steps, len(delays), delays, revert=True)
    reverted = processor.apply_audio_delay(torch.from_numpy(theirs[None].astype(np.int64)), -1, -1, back).numpy()[0]
    np.testing.assert_array_equal(undo_delay(theirs[1:], delays, 11), reverted[1:12])


def test_patterns_by_name() -> None:
    assert parse_delays("musicgen", 4) == (0, 1, 2, 3)
    assert parse_delays("dia", 9) == (0, 8, 9, 10, 11, 12, 13, 14, 15)
    assert parse_delays("parallel", 3, num_sides=2) == (0,) * 6
    assert parse_delays([0, 2], 2, num_sides=2) == (0, 2, 0, 2)
    assert parse_delays([0, 2, 1, 3], 2, num_sides=2) == (0, 2, 1, 3)


@pytest.mark.parametrize("pattern", ["diagonal", [], [1, 2], [0, -1], [0, 1.5], [0, True], 3])
def test_what_is_no_pattern(pattern: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_delays(pattern, 0)
    assert caught.value.code == "bad-value"


def test_a_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_delays([0, 1, 2], 4)
    assert caught.value.code == "bad-value"
