"""If this fails, a music run learns from other rows than it says, or its demos are not what it learned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rung.data.audio import wav_bytes
from rung.data.store import Store
from rung.doctor.preflight import causality
from rung.doctor.preflight.result import CheckContext
from rung.engine.clock import Clock
from rung.engine.state import set_training
from rung.errors import ConfigError, DataError
from rung.random import Draw
from rung.recipe import Sample
from rung.recipes.music.data import codec_of
from rung.recipes.music.delay import undo_delay
from rung.recipes.music.generate import SamplingParams, generate
from rung.recipes.music.recipe import Music
from rung.recipes.music.stream import Clips, TextRules, encode_text
from tests.contract.cases import Case, music
from tests.recipes.music.songs import write_songs, write_store

Rung = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def case(music_data: Path) -> Case:
    return music(music_data)


def recipe_of(case: Case, *words: str) -> Music:
    recipe = case.setup(*words).recipe
    assert isinstance(recipe, Music)
    return recipe


def gather(stream: Clips, step: int, num: int = 16) -> dict[str, np.ndarray]:
    rows = np.arange(num) % stream.num_rows
    return stream.gather(rows, Draw(0, step, np.arange(num)))


def test_rows_are_the_codes_of_the_store(case: Case) -> None:
    recipe = recipe_of(case)
    [stream] = [recipe.streams()["validation"]]
    store = recipe.store
    rows = stream.gather(np.arange(stream.num_rows), Draw(0, -1, np.arange(stream.num_rows)))["codes"]
    for number in store.split("validation").tolist():
        record, own = store.index[number], -(-store.lengths[number] // 60)
        left = record["length"]
        codes = store.arrays["codes"][record["start"] : record["start"] + left][:, recipe.channels]
        for tile, row in enumerate(rows[:own]):
            length = min(60, left - 60 * tile)
            np.testing.assert_array_equal(undo_delay(row[1:], recipe.delays, length), codes[60 * tile :][:length])
        ends = (rows[:own] == recipe.specials.eos).sum(axis=(1, 2))
        assert ends.tolist() == [0] * (own - 1) + [len(recipe.channels)]  # the piece ends once in each channel
        rows = rows[own:]
    assert not len(rows)


def test_crops_differ_from_epoch_to_epoch_only_where_asked(case: Case) -> None:
    for is_random in (True, False):
        stream = recipe_of(case, f"data.random_crop={is_random}").streams()["train"]
        assert isinstance(stream, Clips)
        a, b = (gather(stream, step)["codes"] for step in (0, 7))
        assert np.array_equal(a, b) != is_random


def test_crops_hold_ends_and_every_frame_as_often_as_tiles(case: Case, tmp_path: Path) -> None:
    data = write_store(tmp_path / "data", write_songs(tmp_path / "songs", 8), "codec.hop=64")
    recipe = recipe_of(case, f"dataset.base_dataset_name={data}", "data.context_size=100")
    store, num_epochs = recipe.store, 400
    lengths = store.lengths[store.split("train")]
    assert (lengths > 100).all()
    found = {}
    for is_random in (False, True):
        stream = Clips(store, "train", recipe.pattern, recipe.channels, TextRules(8), random_crop=is_random)
        rows = np.arange(stream.num_rows)
        drawn = [stream.gather(rows, Draw(0, epoch, rows))["codes"] for epoch in range(num_epochs if is_random else 1)]
        codes = np.concatenate(drawn)
        found[is_random] = (codes[..., 0] == recipe.specials.eos).any(axis=1).mean()
        assert (codes < recipe.specials.eos).sum(axis=(1, 2)).mean() == pytest.approx(stream.targets_per_row, rel=0.01)
        # How often each frame of each piece is in a row, in an epoch.
        if is_random:
            seen = [np.zeros(length) for length in lengths]
            for epoch in range(num_epochs):
                for record, at in zip(*stream._places(rows, Draw(0, epoch, rows))):
                    seen[int(np.flatnonzero(store.split("train") == record)[0])][at : at + 100] += 1 / num_epochs
            for times in seen:
                assert 0.3 < times.min() <= times.max() < 2.2
                assert times[100:].std() < 0.1 * times.mean()
    assert found[True] == pytest.approx(found[False], rel=0.25)


def test_both_eval_sets_have_the_same_rows(case: Case) -> None:
    streams = recipe_of(case).streams()
    assert list(streams) == ["train", "validation", "unconditional"]
    rows = np.arange(streams["validation"].num_rows)
    a, b = (streams[name].gather(rows, Draw(0, -1, rows)) for name in ("validation", "unconditional"))
    np.testing.assert_array_equal(a["codes"], b["codes"])
    assert (a["text_length"] > 0).all()
    assert not b["text_length"].any()
    assert not b["text"].any()


def test_texts_are_withheld_shuffled_and_dropped_in_training_alone(music_data: Path) -> None:
    store = Store.open(music_data)
    recipe = recipe_of(music(music_data))

    def texts(rules: TextRules, step: int) -> list[str]:
        arrays = gather(Clips(store, "train", recipe.pattern, recipe.channels, rules), step, 400)
        return [bytes(t[:n]).decode() for t, n in zip(arrays["text"], arrays["text_length"])]

    whole = {"low, slow", "a high note", "plucked, dense, C minor"}
    assert set(texts(TextRules(64), 3)) == whole
    withheld = texts(TextRules(64, unconditional=0.25), 3)
    assert withheld.count("") == pytest.approx(100, abs=30)
    shuffled = set(texts(TextRules(64, shuffle=True), 3))
    assert {"low, slow", "slow, low"} <= shuffled
    assert set(texts(TextRules(64, shuffle=True, dropout=0.5), -1)) == whole  # an eval
    assert "plucked, dense" in texts(TextRules(64, limit=2), -1)
    assert "" in texts(TextRules(64, dropout=0.5), 3)


def test_a_text_is_cut_between_characters() -> None:
    assert bytes(encode_text("naïve", 3)).decode() == "na"
    assert bytes(encode_text("naïve", 4)).decode() == "naï"


def test_the_valid_form_loses_the_last_codes(case: Case) -> None:
    full, valid = (recipe_of(case, f"delay.form={form}").streams()["validation"] for form in ("full", "valid"))
    rows = np.arange(full.num_rows)
    a, b = ((stream.gather(rows, Draw(0, -1, rows))["codes"] < 24).sum(axis=(1, 2)) for stream in (full, valid))
    lost = (a - b)[a == 60 * 4]  # of whole rows
    assert len(lost)
    assert (lost == 2 + 2).all()  # the delay of the later codebook of each side


def test_a_model_trained_on_one_clip_plays_it(case: Case) -> None:
    """Greedy decoding gives its codes back, every one of them."""
    setup = case.setup(
        "model.dropout=0", "data.random_crop=false", "data.unconditional_frac=0", "data.tag_shuffle=false",
        "data.tag_dropout=0", "optimizer.weight_decay=0", "data.batch_size=1", "loss_masking=codes",
        "channel_weights=[]", "model.text_lr_scale=1", "data.eos=false",
    )  # fmt: skip
    recipe, model = setup.recipe, setup.state.model
    assert isinstance(recipe, Music)
    set_training(model)
    prefetcher = setup.prefetcher()
    micros = prefetcher.take(0)
    prefetcher.close()
    for step in range(600):
        signals = setup.stepper.step(step, micros, 5e-3, Clock())
        if float(signals["loss/sum"] / signals["loss/count"]) < 0.01:
            break
    batch = micros[0].batch
    rows = batch["codes"].numpy()[0]
    length = int((rows[:, 0] < recipe.specials.eos).sum())
    expected = undo_delay(rows[1:], recipe.delays, length)
    made = generate(
        model, batch["text"].long(), batch["text_length"], SamplingParams(length, temperature=0),  # type: ignore[arg-type]
        recipe.delays, recipe.specials,
    )  # fmt: skip
    np.testing.assert_array_equal(made[0], expected)


def test_a_removed_causal_mask_is_caught(case: Case) -> None:
    setup = case.setup()
    assert [one.level for one in causality.causality(CheckContext(setup))] == ["pass"]
    decoder = setup.state.model.decoder
    decoder.shape = replace(decoder.shape, causal=False)  # type: ignore[arg-type, assignment]
    assert [one.level for one in causality.causality(CheckContext(setup))] == ["fail"]


def test_data_of_another_codec_is_refused(music_data: Path, tmp_path: Path) -> None:
    folder = write_songs(tmp_path / "songs")
    other = write_store(tmp_path / "other", folder, "dataset.stereo=true", "codec.codebook_size=16")
    with pytest.raises(DataError) as caught:
        recipe_of(music(music_data), f"dataset.extra_datasets=[{other}]")
    assert caught.value.code == "data-mismatch"
    same = write_store(tmp_path / "same", folder, "dataset.stereo=true", f"codec.path={music_data}")
    both = recipe_of(music(music_data), f"dataset.extra_datasets=[{same}]").streams()["train"]
    assert both.num_rows == 2 * recipe_of(music(music_data)).streams()["train"].num_rows


def test_more_codebooks_than_the_codec_has(case: Case) -> None:
    with pytest.raises(ConfigError) as caught:
        case.setup("data.codebooks=4", "channel_weights=[]", "delay.pattern=musicgen")
    assert caught.value.code == "bad-range"


def test_a_demo_that_fails_is_an_event(rung: Rung, case: Case, tmp_path: Path) -> None:
    words = [word for word in case.words if not word.startswith("sampling")]
    small = ("optimizer.max_iters=4", "lr.warmup_iters=1", "eval_iters=1", "data.batch_size=4")
    rung("train", "music", *words, *small, "sample_interval=2", "sampling.audio=missing.wav")
    events = [json.loads(line) for line in (tmp_path / "runs/music/1/events.ndjson").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "sample_failed"] == [2, 4]


def test_samples_are_sound_and_pictures(rung: Rung, case: Case, tmp_path: Path) -> None:
    import wave

    small = ("optimizer.max_iters=3", "lr.warmup_iters=1", "eval_iters=1", "data.batch_size=4")
    rung("train", "music", *case.words, *small)
    made = json.loads(rung("sample", "music", "--prompt", "a high note", "--num", 2, "--json").stdout)
    names = [Path(one["path"]).name for one in made]
    assert names == ["sample-0.wav", "sample-0.png", "sample-1.wav", "sample-1.png"]
    with wave.open(str(tmp_path / made[0]["path"])) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 1600)
    songs = write_songs(tmp_path / "songs", 1)
    longer = rung("sample", "music", "--audio", songs / "song-0.wav", "sampling.seconds=1", "--json").stdout
    assert "song-0.wav" in json.loads(longer)[0]["caption"]
    refused = rung("sample", "music", "sampling.seconds=100", check=False)
    assert refused.returncode == 2
    refused = rung("sample", "music", "--audio", songs / "song-0.wav", "sampling.seconds=0.02", check=False)
    assert refused.returncode == 2
    assert "0.05" in refused.stderr  # two frames
    short = json.loads(rung("sample", "music", "sampling.seconds=0.001", "--json").stdout)
    with wave.open(str(tmp_path / short[0]["path"])) as file:
        assert file.getnframes() == 200
    assert rung("sample", "music", "sampling.guidance_scale=1e38", check=False).returncode == 2
    long = json.loads(rung("sample", "music", "--prompt", "a high note, and another", "--json").stdout)
    assert "first 20 bytes" in long[0]["caption"]


def test_a_sound_is_made_where_no_picture_can_be(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = case.setup("sampling.num_samples=2")
    monkeypatch.setitem(sys.modules, "PIL", None)
    made = setup.samples(Draw(0, 0, np.arange(1)))
    assert [one.name for one in made] == ["sample-0.wav", "sample-1.wav"]
    assert ["Pillow" in one.caption for one in made] == [True, False]


def test_data_without_texts(case: Case, tmp_path: Path) -> None:
    songs = write_songs(tmp_path / "songs", 4)
    for text in songs.glob("*.txt"):
        text.unlink()
    without = f"dataset.base_dataset_name={write_store(tmp_path / 'data', songs, 'dataset.stereo=true')}"
    assert [one.name for one in recipe_of(case).inputs()] == ["text"]
    assert not recipe_of(case, without).inputs()
    [sound, _] = case.setup(without, "sampling.prompt=a high note").samples(Draw(0, 0, np.arange(1)))
    assert "not learned from texts" in sound.caption


@pytest.mark.parametrize(("form", "words", "num_frames", "num_beyond"), [
    ("full", "sampling.seconds=0", 60, 0), ("full", "sampling.seconds=1.475", 59, 1),
    ("full", "sampling.seconds=1", 40, 2), ("valid", "sampling.seconds=0", 58, 2),
])  # fmt: skip
def test_a_clip_ends_as_rows_of_training_do(
    case: Case, monkeypatch: pytest.MonkeyPatch, form: str, words: str, num_frames: int, num_beyond: int
) -> None:
    from rung.recipes.music import samples

    asked: list[SamplingParams] = []

    def noted(model: object, text: object, length: object, params: SamplingParams, *rest: object, **more: object):  # type: ignore[no-untyped-def]
        asked.append(params)
        return [np.zeros((params.num_frames, 4), np.uint16)]

    monkeypatch.setattr(samples, "generate", noted)
    case.setup(f"delay.form={form}", words).samples(Draw(0, 0, np.arange(1)))
    assert [(one.num_frames, one.num_beyond) for one in asked] == [(num_frames, num_beyond)]


def test_the_parts_of_a_split_are_over_all_its_rows(rung: Rung, case: Case) -> None:
    words = [word for word in case.words if not word.startswith(("loss_masking", "channel_weights"))]
    small = ("optimizer.max_iters=2", "lr.warmup_iters=1", "eval_iters=1", "data.batch_size=1")
    rung("train", "music", *words, *small, "--no-check")
    found = json.loads(rung("eval", "music/1", "--split", "validation", "--json").stdout)["sets"]["validation"]
    assert found["rows"] > 1
    assert found["parts"]["codes_only"] == pytest.approx(found["loss"], rel=1e-6)
    for name, one in found["target_parts"].items():
        assert found["parts"][f"codebook/{name}"] == pytest.approx(one["loss"], rel=1e-6)


def test_a_model_refuses_codes_of_another_codec(rung: Rung, case: Case, tmp_path: Path) -> None:
    small = ("optimizer.max_iters=2", "lr.warmup_iters=1", "eval_iters=1", "data.batch_size=4")
    rung("train", "music", *case.words, *small, "--no-check")
    other = write_store(tmp_path / "other", write_songs(tmp_path / "songs", 4), "dataset.stereo=true", "codec.steps=3")
    refused = rung("sample", "music", f"dataset.base_dataset_name={other}", check=False)
    assert refused.returncode == 2
    assert "codec" in refused.stderr


def test_a_pretrained_codec_of_transformers(tmp_path: Path) -> None:
    """Its weights stay where they are; the data knows them by their hash."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DacConfig(
        encoder_hidden_size=8, decoder_hidden_size=16, n_codebooks=3, codebook_size=32, codebook_dim=4,
        downsampling_ratios=[4, 5, 10], upsampling_ratios=[10, 5, 4], sampling_rate=8000,
    )  # fmt: skip
    transformers.DacModel(config).save_pretrained(tmp_path / "dac")
    folder = write_songs(tmp_path / "songs", 4)
    out = write_store(tmp_path / "data", folder, "codec.name=dac", f"codec.path={tmp_path / 'dac'}")
    store = Store.open(out)
    assert (store.info["codec"]["kind"], store.info["codec"]["num_codebooks"]) == ("dac", 3)
    assert store.arrays["codes"].shape[1] == 3
    codec = codec_of(store)
    first = store.index[0]
    codes = np.asarray(store.arrays["codes"][first["start"] : first["start"] + first["length"]])
    assert len(codec.decode(codes)) == first["length"] * 200
    transformers.DacModel(config).save_pretrained(tmp_path / "dac")  # other weights in their place
    with pytest.raises(DataError) as caught:
        codec_of(store)
    assert caught.value.code == "data-mismatch"


def test_preparing_again_keeps_the_codec_unless_asked(tmp_path: Path) -> None:
    folder = write_songs(tmp_path / "songs", 4)
    hashes = []
    for words in ((), (), ("codec.fit=true", "codec.steps=3")):
        out = write_store(tmp_path / "data", folder, *words)
        hashes.append(Store.open(out).info["codec"]["hash"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_cannot_be_used_is_listed_and_not_encoded(tmp_path: Path) -> None:
    folder = write_songs(tmp_path / "songs", 4)
    whole = (folder / "song-1.wav").read_bytes()
    (folder / "cut.wav").write_bytes(whole[: len(whole) // 2])
    (folder / "silent.wav").write_bytes(wav_bytes(np.zeros((16000, 1), np.float32), 8000))
    (folder / "text.mp3").write_text("not music")
    (folder / "short.wav").write_bytes(wav_bytes(0.5 * np.ones(100, np.float32), 8000))
    store = Store.open(write_store(tmp_path / "data", folder))
    assert {"cut.wav", "silent.wav", "text.mp3", "short.wav"} <= {one["file"] for one in store.info["quarantined"]}
    assert {record["source"] for record in store.index} == {f"song-{n}.wav" for n in range(4)}


def test_of_a_long_clip_only_the_end_is_encoded() -> None:
    from rung.recipes.music.config import Sampling
    from rung.recipes.music.player import MusicPlayer, MusicRequest

    heard: list[np.ndarray] = []

    def make(cfg: Any, given: Any, draw: Any) -> Sample:
        heard.append(given.sound)
        return Sample("sample.wav", b"", "")

    one = MusicPlayer(make, Sampling(), {"sample_rate": 100, "most_seconds": 2.0})
    list(one.answer(MusicRequest(sound=np.arange(5000, dtype="<i2").tobytes())))
    assert (heard[0][:, 0] * 32768).tolist() == list(range(4800, 5000))
