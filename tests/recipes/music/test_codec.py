"""If this fails, codes no longer belong to their sound: lengths, files, hashes, or equal codes for equal sounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rung.errors import DataError, UserError
from rung.recipes.music import rvq
from rung.recipes.music.codec import SETTINGS, WEIGHTS, Codec, load_codec, open_codec
from rung.recipes.music.rvq import Frames, RvqCodec, fit_codec
from rung.recipes.music.spectra import si_sdr

RATE, HOP = 8000, 80


def tune(seed: int, num_s: float = 4.0) -> np.ndarray:
    """Decaying tones, five a second."""
    draw = np.random.default_rng(seed)
    sound = np.zeros(int(num_s * RATE), np.float32)
    for start in np.arange(0, len(sound) - 400, RATE // 5):
        t = np.arange(len(sound) - start) / RATE
        pitch = 220 * 2 ** (draw.integers(0, 24) / 12)
        sound[start:] += (draw.uniform(0.1, 0.4) * np.exp(-6 * t) * np.sin(2 * np.pi * pitch * t)).astype(np.float32)
    return sound


def fit(seed: int = 0, **changes: int) -> RvqCodec:
    settings = {"num_codebooks": 4, "codebook_size": 64, "steps": 6} | changes
    return fit_codec([tune(1), tune(2), tune(3)], sample_rate=RATE, hop=HOP, seed=seed, device="cpu", **settings)


@pytest.fixture(scope="module")
def codec() -> RvqCodec:
    return fit()


def test_what_it_says_about_itself(codec: RvqCodec) -> None:
    assert (codec.sample_rate, codec.hop, codec.num_codebooks, codec.codebook_size) == (RATE, HOP, 4, 64)
    assert codec.frames_per_s == 100
    assert codec.bits_per_s == 100 * 4 * 6
    assert len(codec.hash) == 64


def test_every_length_has_its_frames(codec: RvqCodec) -> None:
    sound = tune(9)
    for num in [*range(1, 3 * HOP + 1, 7), HOP, 2 * HOP, 2 * HOP + 1, 3 * HOP]:
        codes = codec.encode(sound[:num])
        assert codes.shape == (-(-num // HOP), 4)
        assert codes.dtype == np.uint16
        back = codec.decode(codes)
        assert back.shape == (len(codes) * HOP,)
        assert back.dtype == np.float32
        assert np.isfinite(back).all()


def test_sound_comes_back_and_every_book_helps(codec: RvqCodec) -> None:
    sounds = [tune(seed) for seed in range(10, 14)]
    figures = [
        np.mean([si_sdr(s, codec.decode(codec.encode(s)[:, :level])[: len(s)]) for s in sounds])
        for level in (1, 2, 3, 4)
    ]
    assert figures == sorted(figures)
    assert figures[-1] > 4


def test_frames_are_an_orthonormal_transform_with_whole_ends() -> None:
    frames = Frames(HOP, 1)
    sound = torch.randn(10 * HOP, generator=torch.Generator().manual_seed(0))
    y = frames.mdct(sound) @ frames.transform_NF.T
    whole = torch.zeros(13, HOP)
    whole[:-1] += y[:, :HOP]
    whole[1:] += y[:, HOP:]
    start = HOP + HOP // 2
    torch.testing.assert_close(whole.flatten()[start : start + 10 * HOP], sound, atol=1e-5, rtol=0)


def test_ends_are_as_true_as_the_middle() -> None:
    """A codec whose quantiser and network change nothing gives back every sample, the first and the last too."""
    codec = fit(num_codebooks=1, codebook_size=32, steps=1)
    codec.frames.basis_XD = torch.eye(len(codec.frames.basis_XD))
    for parameter in (codec.decoder.leave.weight, codec.decoder.leave.bias):
        parameter.zero_()
    sound = tune(5, 0.1)
    latents = codec.frames.describe(codec.frames.mdct(torch.from_numpy(sound)))
    codec.decoder.scale_D = torch.ones(latents.shape[1])
    codec.decoder.enter = torch.nn.Linear(latents.shape[1] + 2 * codec.frames.bands_FE.shape[1], rvq.WIDTH)
    codec.books_CKD = latents[None].contiguous()
    back = codec._decode(np.arange(len(latents))[:, None])
    np.testing.assert_allclose(back, sound, atol=1e-4)


def test_same_seed_same_codec_other_seed_another(codec: RvqCodec) -> None:
    assert fit().hash == codec.hash
    assert fit(seed=1).hash != codec.hash
    assert fit(steps=7).hash != codec.hash


def test_fitting_leaves_the_random_numbers_of_others_alone() -> None:
    state = torch.get_rng_state()
    fit(num_codebooks=1, codebook_size=8, steps=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_long_sounds_do_not_depend_on_where_they_are_cut(codec: RvqCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = np.concatenate([tune(seed) for seed in range(20, 24)])  # 1600 frames, four blocks
    codes = codec.encode(sound)
    back = codec.decode(codes)
    assert np.array_equal(codec.encode(sound), codes)
    assert np.array_equal(codec.decode(codes), back)
    # A longer sound begins with the same codes, up to the last frames, which hear what follows.
    assert np.array_equal(codec.encode(np.concatenate([sound, tune(3)]))[: len(codes) - 2], codes[:-2])
    for block in (100, 4096):
        monkeypatch.setattr(rvq, "BLOCK", block)
        # Products of other sizes are rounded otherwise, and a tie may then fall the other way.
        assert (codec.encode(sound) == codes).all(1).mean() > 0.995
        np.testing.assert_allclose(codec.decode(codes), back, atol=1e-4)


def test_a_part_of_the_codes_is_that_part_of_the_sound(codec: RvqCodec) -> None:
    codes = codec.encode(tune(6))
    whole, part = codec.decode(codes), codec.decode(codes[33:150])
    edge = (codec.decoder.reach + 1) * HOP
    np.testing.assert_allclose(part[edge:-edge], whole[33 * HOP : 150 * HOP][edge:-edge], atol=1e-4)


def test_search_is_no_worse_than_the_nearest_code_in_turn(codec: RvqCodec) -> None:
    latent = codec.frames.describe(codec.frames.mdct(torch.from_numpy(tune(8))))
    left = latent.clone()
    for book in codec.books_CKD:
        left = left - book[torch.cdist(left, book).argmin(1)]
    found = latent - codec.latent(codec.search(latent))
    assert found.square().sum() < left.square().sum()


def test_the_highest_scores_are_those_of_topk() -> None:
    score = torch.randn(20, 4, 128, generator=torch.Generator().manual_seed(0))
    before = torch.randn(20, 4, 1, generator=torch.Generator().manual_seed(1))
    for width in (1, 4):
        best, place = rvq._top(score, before, width)
        expected = (score + before).flatten(1).topk(width, 1)
        torch.testing.assert_close(best, expected.values)
        assert torch.equal(place, expected.indices)


def test_saved_and_loaded_is_the_same(codec: RvqCodec, tmp_path: Path) -> None:
    codec.save(tmp_path / "codec")
    again = open_codec("rvq", tmp_path / "codec")
    sound = tune(7)
    assert again.hash == codec.hash
    assert np.array_equal(again.encode(sound), codec.encode(sound))
    assert np.array_equal(again.decode(codec.encode(sound)), codec.decode(codec.encode(sound)))


@pytest.mark.parametrize("damage", ["weights", "hash", "torn", "json", "settings"])
def test_a_damaged_file_is_refused(codec: RvqCodec, tmp_path: Path, damage: str) -> None:
    codec.save(tmp_path)
    weights, about = tmp_path / WEIGHTS, json.loads((tmp_path / SETTINGS).read_text())
    data = bytearray(weights.read_bytes())
    if damage == "weights":
        data[-5] ^= 1
        weights.write_bytes(data)
    elif damage == "torn":
        weights.write_bytes(data[: len(data) // 2])
    elif damage == "json":
        (tmp_path / SETTINGS).write_text("{")
    else:
        about["hash"] = "0" * 64 if damage == "hash" else about["hash"]
        about["settings"]["beam"] = 2 if damage == "settings" else about["settings"]["beam"]
        (tmp_path / SETTINGS).write_text(json.dumps(about))
    with pytest.raises(DataError) as caught:
        load_codec(tmp_path)
    assert caught.value.code == "file-damaged"


def test_no_codec_there(tmp_path: Path) -> None:
    for kind in ("rvq", "dac"):
        with pytest.raises(DataError) as caught:
            open_codec(kind, tmp_path)
        assert caught.value.code == "no-file"
    with pytest.raises(UserError) as unknown:
        open_codec("mp3", tmp_path)
    assert unknown.value.code == "no-codec"


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        (np.array([[64]]), "bad-code"), (np.array([[-1]]), "bad-code"), (np.array([[0.5]]), "bad-code"),
        (np.zeros((0, 4), int), "bad-shape"), (np.zeros((3, 5), int), "bad-shape"), (np.zeros(3, int), "bad-shape"),
    ],
)  # fmt: skip
def test_codes_that_are_none_are_refused(codec: RvqCodec, codes: np.ndarray, code: str) -> None:
    with pytest.raises(DataError) as caught:
        codec.decode(codes)
    assert caught.value.code == code


def test_sounds_that_are_none_are_refused(codec: RvqCodec) -> None:
    for sound, code in (
        (np.zeros((9, 2)), "bad-shape"),
        (np.zeros(0), "bad-shape"),
        (np.array([np.nan]), "not-finite"),
    ):
        with pytest.raises(DataError) as caught:
            codec.encode(sound)
        assert caught.value.code == code
    with pytest.raises(DataError) as caught:
        fit_codec([tune(1, 0.1)], sample_rate=RATE, hop=HOP)
    assert caught.value.code == "too-little"
    for sound, code in ((np.zeros((9000, 2)), "bad-shape"), (np.full(9000, np.nan), "not-finite")):
        with pytest.raises(DataError) as caught:
            fit_codec([tune(1), sound], sample_rate=RATE, hop=HOP)
        assert caught.value.code == code
    with pytest.raises(UserError) as caught_user:
        fit(codebook_size=1)
    assert caught_user.value.code == "config"


def test_silence_can_be_fitted_to_and_coded() -> None:
    codec = fit_codec(
        [np.zeros(2 * RATE, np.float32)], sample_rate=RATE, hop=HOP, num_codebooks=2, codebook_size=8, steps=2
    )
    back = codec.decode(codec.encode(np.zeros(500, np.float32)))
    assert np.abs(back).max() < 0.01


def pretrained(kind: str, folder: Path) -> Codec:
    """A small model with random weights, saved as transformers does."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "dac":
        config = transformers.DacConfig(
            encoder_hidden_size=8, downsampling_ratios=[2, 4, 4], upsampling_ratios=[4, 4, 2], decoder_hidden_size=32,
            n_codebooks=3, codebook_size=32, codebook_dim=4, sampling_rate=4000,
        )  # fmt: skip
        model = transformers.DacModel(config)
    elif kind == "encodec":
        config = transformers.EncodecConfig(
            sampling_rate=4000, target_bandwidths=[1.25, 2.5], num_filters=4, hidden_size=16, codebook_size=32,
            codebook_dim=16, upsampling_ratios=[4, 4, 2], num_residual_layers=1, num_lstm_layers=1,
        )  # fmt: skip
        model = transformers.EncodecModel(config)
    else:
        config = transformers.MimiConfig(
            sampling_rate=4000, frame_rate=62.5, num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=8,
            vector_quantization_hidden_dimension=8, upsampling_ratios=[4, 4, 2], num_quantizers=3,
            num_semantic_quantizers=1, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            intermediate_size=16, sliding_window=16, upsample_groups=16,
        )  # fmt: skip
        model = transformers.MimiModel(config)
    for name, buffer in model.named_buffers():  # books begin as zeros
        if name.endswith(("embed", "embed_sum")):
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(folder)
    return open_codec(kind, folder)


@pytest.mark.parametrize("kind", ["dac", "encodec", "mimi"])
def test_codecs_of_others(kind: str, tmp_path: Path) -> None:
    codec = pretrained(kind, tmp_path / "a")
    assert codec.hop == {"dac": 32, "encodec": 32, "mimi": 64}[kind]
    assert codec.codebook_size == 32
    assert codec.sample_rate == 4000
    sound = tune(4)
    for num in (1, 31, 32, 33, 64, 65, 700):
        codes = codec.encode(sound[:num])
        assert codes.shape == (-(-num // codec.hop), codec.num_codebooks)
        assert codes.dtype == np.uint16
        assert codec.decode(codes).shape == (len(codes) * codec.hop,)
    assert np.array_equal(codec.encode(sound[:700]), codes)
    coarse = codec.decode(codes[:, : codec.num_codebooks - 1])
    assert coarse.shape == (len(codes) * codec.hop,)
    assert not np.array_equal(coarse, codec.decode(codes))
    with pytest.raises(DataError):
        codec.decode(np.full((2, 1), 32))
    again = open_codec(kind, tmp_path / "a")
    assert again.hash == codec.hash
    assert np.array_equal(again.decode(codes), codec.decode(codes))
    with pytest.raises(UserError) as caught:
        codec.save(tmp_path / "b")
    assert caught.value.code == "not-supported"


@pytest.mark.parametrize("kind", ["dac", "encodec", "mimi"])
def test_long_sounds_pass_through_codecs_of_others_in_pieces(kind: str, tmp_path: Path) -> None:
    codec = pretrained(kind, tmp_path)
    sound = np.concatenate([tune(seed, 20) for seed in (1, 2)])  # 80 s at their rate
    codes = codec.encode(sound)
    assert codes.shape == (-(-len(sound) // codec.hop), codec.num_codebooks)
    assert codec.decode(codes).shape == (len(codes) * codec.hop,)


def test_without_transformers_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError) as caught:
        open_codec("mimi", tmp_path)
    assert caught.value.code == "not-installed"
