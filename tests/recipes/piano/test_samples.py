"""If this fails, what a model makes of a prompt is put in the wrong place, or a user's file is not what it is given."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rung.errors import UserError
from rung.nn.transformer import Shape, Transformer
from rung.recipes.piano import samples
from rung.recipes.piano.config import Sampling
from rung.recipes.piano.midi import read_midi, write_midi
from rung.recipes.piano.notes import join, make
from rung.recipes.piano.samples import Completion, Prompt, artifacts, complete, from_file, from_nothing
from rung.recipes.piano.tasks import TASKS, prefix_of, question
from rung.recipes.piano.tokenizer import CLS, GENAI, NOTE_OFF, NOTE_ON, TIME, TOKENIZER, VELOCITY, VOCAB_SIZE
from tests.errors import raises_code
from tests.recipes.piano.tunes import answer

USUAL = Sampling(num_tokens=60)
GREEDY = Sampling(num_tokens=60, temperature=0.0)


def tune(num_notes: int = 30, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    start = np.cumsum(rng.integers(1, 30, size=num_notes)) * 0.01
    start -= start[0]
    length = rng.integers(5, 40, size=num_notes) * 0.01
    return make(start, start + length, rng.permutation(np.arange(40, 100))[:num_notes], 4 * rng.integers(5, 25) + 2)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(Shape(vocab_size=VOCAB_SIZE, context_size=256, n_layer=1, n_head=2, n_embd=16), seed=0)


@pytest.fixture
def song(tmp_path: Path) -> Path:
    path = tmp_path / "song.mid"
    path.write_bytes(write_midi(tune()))
    return path


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Prompts out of files -----------------------------------------------------------------------------------------------


def test_a_file_is_the_prompt(song: Path) -> None:
    prompt = from_file(song, None, context_size=2048)
    assert np.array_equal(prompt.ids, np.concatenate([[CLS], TOKENIZER.encode(tune())]))
    assert np.array_equal(prompt.notes["pitch"], tune()["pitch"])
    assert prompt.origin_s == prompt.notes["end"].max()
    assert prompt.label == "song.mid"
    asked = from_file(song, TASKS["high_notes"], (30,), context_size=2048, prefix=prefix_of("bach", "Bach"))
    assert np.array_equal(asked.ids, question(TASKS["high_notes"], (30,), prompt.notes, prefix_of("bach", "Bach")))
    assert asked.ids[-1] == GENAI
    # Rows of the next token have their prefix first, as they are windows of records that begin with <CLS>.
    prefixed = from_file(song, None, context_size=2048, prefix=prefix_of("bach", "Bach"))
    assert np.array_equal(prefixed.ids, [*prefix_of("bach", "Bach"), *prompt.ids])
    assert from_nothing().ids.tolist() == [CLS]


def test_a_file_that_begins_late_and_leaves_the_piano(tmp_path: Path) -> None:
    late = join([make(100 + tune()["start"], 100 + tune()["end"], tune()["pitch"], 60), make(100.5, 101, 127, 60)])
    (tmp_path / "late.mid").write_bytes(write_midi(late))
    prompt = from_file(tmp_path / "late.mid", None, context_size=2048)
    assert (len(prompt.notes), prompt.notes["start"].min()) == (30, 0)
    assert prompt.label == "late.mid, without 1 outside the piano"


@settings(max_examples=25)
@given(st.integers(24, 700), st.sampled_from([None, "continuation", "top_line", "velocity_denoising"]))
def test_as_many_notes_are_kept_as_fill_half_a_context(
    tmp_path_factory: pytest.TempPathFactory, context_size: int, name: str | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "long.mid"
    if not path.exists():
        path.write_bytes(write_midi(tune(60)))
    task = TASKS[name] if name else None
    values = task.values_of([]) if task else ()
    prompt = from_file(path, task, values, context_size=context_size)
    is_last = name in (None, "continuation")

    def asked(num: int) -> int:
        kept = tune(60)[60 - num :] if is_last else tune(60)[:num]
        kept = make(kept["start"] - kept["start"][0], kept["end"] - kept["start"][0], kept["pitch"], kept["velocity"])
        return len(question(task, values, kept)) if task else 1 + len(TOKENIZER.encode(kept))

    num = len(prompt.notes)
    assert len(prompt.ids) == asked(num) <= context_size // 2
    assert num == 60 or asked(num + 1) > context_size // 2
    assert np.array_equal(prompt.notes["pitch"], (tune(60)[60 - num :] if is_last else tune(60)[:num])["pitch"])
    assert prompt.notes["start"][0] == 0
    which = "last" if is_last else "first"
    assert prompt.label == ("long.mid" if num == 60 else f"the {which} {num} of 60 notes of long.mid")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (None, "no-file"),
        (b"", "file-damaged"),
        (b"RIFF, not a MIDI file at all", "file-damaged"),
        (write_midi(tune()[:0]), "file-empty"),
        (write_midi(make(0, 1, 5, 60)), "file-empty"),
    ],
)
def test_a_file_that_cannot_be_a_prompt_is_refused_in_one_line(tmp_path: Path, data: bytes | None, code: str) -> None:
    path = tmp_path / "odd\x1b[31m\nname.mid"
    if data is not None:
        path.write_bytes(data)
    with raises_code(code) as refused:
        from_file(path, None, context_size=512)
    assert str(refused.value).isprintable()
    assert str(refused.value).startswith("sampling.prompt: ")


def test_a_context_without_room_for_a_note_is_refused(song: Path) -> None:
    with raises_code("too-large") as refused:
        from_file(song, None, context_size=6)
    assert "data.context_size=6" in str(refused.value)


def test_the_span_of_an_infill_is_emptied_and_must_lie_in_the_file(song: Path) -> None:
    infill = TASKS["infill"]
    prompt = from_file(song, infill, (2, 2), context_size=2048)
    is_in = (tune()["start"] >= 1.0) & (tune()["start"] < 2.0)
    assert np.array_equal(prompt.notes["pitch"], tune()[~is_in]["pitch"])
    assert prompt.reference is not None
    assert np.array_equal(prompt.reference["pitch"], tune()[is_in]["pitch"])
    assert (prompt.origin_s, prompt.label) == (1.0, f"song.mid, {is_in.sum()} notes taken out")
    song.write_bytes(write_midi(tune()[~is_in]))  # somebody's own hole
    hole = from_file(song, infill, (2, 2), context_size=2048)
    assert np.array_equal(hole.ids, prompt.ids)
    assert (hole.reference, hole.label) == (None, "song.mid")
    with raises_code("bad-range") as refused:
        from_file(song, infill, (100, 2), context_size=2048)
    assert "from 50 s, 1 s long" in str(refused.value)
    assert "sampling.parameters=[from, length]" in str(refused.value)


# Completions --------------------------------------------------------------------------------------------------------


class Parrot(Transformer):
    """Generates the ids of `rows`, whatever its prompts are."""

    def __init__(self, rows: list[np.ndarray]) -> None:
        super().__init__(Shape(vocab_size=VOCAB_SIZE, context_size=256, n_layer=1, n_head=1, n_embd=4))
        self.rows, self.place = rows, 0

    def logits(self, x_BTC: torch.Tensor) -> torch.Tensor:
        logits_BV = torch.zeros(len(self.rows), VOCAB_SIZE)
        for row, ids in enumerate(self.rows):
            logits_BV[row, int(ids[min(self.place, len(ids) - 1)])] = 9.0
        self.place += 1
        return logits_BV


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("grammar", [True, False])
def test_a_right_answer_comes_back_in_its_place(name: str, grammar: bool) -> None:
    task, piece = TASKS[name], tune(12)
    values = task.fitting(piece, task.values_of([]))
    given, target = task.split(piece, values, 3)
    origin_s = task.origin(given, values)
    prompt = Prompt(question(task, values, given), given, task, values, origin_s, "a piece", target)
    params = Sampling(num_tokens=250, temperature=0.0, grammar=grammar)
    (made,) = complete(Parrot([answer(target, origin_s)]), [prompt], params, None)
    assert made.cut_at is None
    for column in ("start", "end"):
        np.testing.assert_allclose(made.notes[column], target[column], atol=1e-6)
    assert np.array_equal(made.notes["pitch"], target["pitch"])
    assert "note F1 1.00 against what was played" in samples.caption_of(prompt, made, params)
    np.testing.assert_allclose(prompt.whole(made.notes)["start"], piece["start"], atol=1e-6)


def test_time_continues_from_the_last_event_of_a_prompt_without_a_task(song: Path) -> None:
    prompt = from_file(song, None, context_size=2048)
    next_notes = make([0.5, 0.7], [0.6, 1.0], [60, 64], 62)
    (made,) = complete(Parrot([TOKENIZER.encode(next_notes)]), [prompt], GREEDY, None)
    end_s = prompt.notes["end"].max()
    np.testing.assert_allclose(made.notes["start"][:2], [end_s + 0.5, end_s + 0.7])
    np.testing.assert_allclose(made.notes["end"][0], end_s + 0.6)


def test_a_prompt_that_breaks_off_anywhere_is_taken_up_there() -> None:
    ids = np.array([CLS, VELOCITY + 3, NOTE_ON + 40, TIME + 3, VELOCITY + 20])
    prompt = Prompt(ids, TOKENIZER.decode(ids, keep_open=True), None, (), 0.08, "half a piece")
    ids = np.array([NOTE_ON + 44, TIME + 4, NOTE_OFF + 40, NOTE_OFF + 44])
    (made,) = complete(Parrot([ids]), [prompt], Sampling(num_tokens=4, temperature=0.0), None)
    assert made.notes.tolist() == [(0.08, 0.24, 65, 82)]  # as loud as in the prompt; the older note is the prompt's


def test_prompts_of_all_kinds_are_completed_in_one_batch_as_each_alone(model: Transformer, song: Path) -> None:
    prompts = [
        from_nothing(),
        from_file(song, None, context_size=256),
        from_file(song, TASKS["top_line"], context_size=256),
        from_file(song, TASKS["infill"], (2, 2), context_size=200),
    ]
    together = complete(model, prompts, GREEDY, None)
    for prompt, made in zip(prompts, together, strict=True):
        (alone,) = complete(model, [prompt], GREEDY, None)
        assert np.array_equal(made.notes, alone.notes)
        assert made.cut_at == alone.cut_at
    assert complete(model, [], GREEDY, None) == []


def test_a_model_that_asks_again_loses_nothing_of_its_answer() -> None:
    ids = np.concatenate([TOKENIZER.encode(tune(3)), [GENAI], TOKENIZER.encode(tune(2))])
    params = Sampling(num_tokens=len(ids), temperature=0.0, grammar=False)
    (made,) = complete(Parrot([ids]), [from_nothing()], params, None)
    assert len(made.notes) == 5


@pytest.mark.parametrize("grammar", [True, False])
def test_an_answer_that_is_cut_says_so(model: Transformer, song: Path, grammar: bool) -> None:
    keys = np.arange(20, 60)
    endless = np.concatenate([np.stack([np.full(40, VELOCITY), NOTE_ON + keys], axis=1).ravel(), [TIME]])
    asked, free = from_file(song, TASKS["top_line"], context_size=256), from_nothing()
    params = Sampling(num_tokens=30, temperature=0.0, grammar=grammar)
    cut, plain = complete(Parrot([endless, endless]), [asked, free], params, None)
    assert (cut.cut_at, plain.cut_at) == (30, None)  # a continuation is as long as was asked for
    assert "cut after 30 tokens" in samples.caption_of(asked, cut, params)
    assert (len(cut.notes) > 0) == grammar  # without a grammar nothing came to its end
    (long,) = complete(Parrot([endless]), [asked], replace(params, num_tokens=9999), None)
    assert long.cut_at == 257 - len(asked.ids)  # never more than the context holds


def test_the_same_seed_gives_the_same_notes(model: Transformer) -> None:
    first, again, other = (complete(model, [from_nothing()] * 2, USUAL, seeded(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(one.notes, two.notes) for one, two in zip(first, again, strict=True))
    assert not all(np.array_equal(one.notes, two.notes) for one, two in zip(first, other, strict=True))


# Files --------------------------------------------------------------------------------------------------------------


def colours(picture: bytes) -> set[str]:
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)[46:]  # below the legend
    red, blue = pixels[..., 0], pixels[..., 2]
    return {name for name, found in (("model", blue - red > 40), ("prompt", red - blue > 40)) if found.any()}


@pytest.mark.parametrize("name", ["continuation", "infill", "top_line", "velocity_denoising", "timing_denoising"])
def test_files_have_the_whole_and_the_picture_has_both(name: str) -> None:
    task, piece = TASKS[name], tune(12)
    values = task.fitting(piece, task.values_of([]))
    given, target = task.split(piece, values, 3)
    prompt = Prompt(question(task, values, given), given, task, values, 0.0, "a piece", target)
    made = {sample.name: sample for sample in artifacts(4, prompt, Completion(target), USUAL)}
    heard = read_midi(made["sample-4.mid"].data)
    np.testing.assert_allclose(heard["start"], piece["start"], atol=1e-3)
    assert np.array_equal(heard["velocity"], piece["velocity"])
    assert colours(made["sample-4.png"].data) == {"model", "prompt"}
    assert {"sample-4.wav"} < set(made) or {"sample-4.no-sound.txt"} < set(made)
    caption = made["sample-4.mid"].caption
    assert caption.startswith(f"{task.describe(values)}: {len(given)} notes given, {len(target)} made, ")
    assert caption.endswith("temperature 1, note F1 1.00 against what was played; prompt: a piece")


def test_from_nothing_there_is_one_colour_and_no_prompt_in_the_caption() -> None:
    made = {sample.name: sample for sample in artifacts(0, from_nothing(), Completion(tune(5)), USUAL)}
    assert colours(made["sample-0.png"].data) == {"model"}
    seconds = f"{tune(5)['end'].max():.1f} s"
    assert made["sample-0.mid"].caption == f"5 notes, {seconds}, 1.0 voices, from nothing, temperature 1"
    none = next(artifacts(0, from_nothing(), Completion(tune(5)[:0]), USUAL))
    assert none.caption == "no notes in 60 tokens: allow more of them, or train longer"


def bars(picture: bytes) -> list[tuple[str, int]]:
    """Colour and width of each bar, from left to right, of notes that all have one pitch."""
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)[46:]
    warmth = pixels[..., 0] - pixels[..., 2]
    row = warmth[np.abs(warmth).sum(axis=1).argmax()]
    signs = np.where(np.abs(row) > 40, np.sign(row), 0)
    runs = np.split(signs, np.flatnonzero(np.diff(signs)) + 1)
    return [("prompt" if run[0] > 0 else "model", len(run)) for run in runs if run[0]]


def test_the_picture_shows_what_is_heard() -> None:
    """A key that sounds is struck again by the model, and later by the prompt: each ends the note before it."""
    given, made = make([0, 8], [6, 9], 60, 62), make([2, 7], [4, 10], 60, 62)
    task = TASKS["top_line"]
    prompt = Prompt(question(task, (), given), given, task, (), 0.0, "a piece")
    picture = {sample.name: sample for sample in artifacts(0, prompt, Completion(made), USUAL)}["sample-0.png"]
    whose, widths = zip(*bars(picture.data), strict=True)
    assert whose == ("prompt", "model", "model", "prompt")
    second_px = widths[0] / 2
    np.testing.assert_allclose(np.array(widths) / second_px, [2, 2, 1, 1], atol=0.1)


def test_music_too_long_to_hear_is_still_written() -> None:
    long = make([0, 3700], [1, 3701], 60, 62)
    made = {sample.name: sample for sample in artifacts(0, from_nothing(), Completion(long), USUAL)}
    assert list(made) == ["sample-0.mid", "sample-0.no-picture.txt", "sample-0.no-sound.txt"]
    assert len(read_midi(made["sample-0.mid"].data)) == 2
    assert b"more than 3600 s" in made["sample-0.no-picture.txt"].data


def test_without_a_sound_font_the_notes_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(notes: np.ndarray) -> None:
        raise UserError("no sound font; be online once")

    monkeypatch.setattr(samples, "to_wav", fail)
    made = list(artifacts(0, from_nothing(), Completion(tune(5)), USUAL))
    assert [sample.name for sample in made] == ["sample-0.mid", "sample-0.png", "sample-0.no-sound.txt"]
    assert made[-1].data == b"no sound font; be online once\n"
