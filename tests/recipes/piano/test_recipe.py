"""If this fails, a run learns from other data than it says, in another stage, or says nothing where it should."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch

from rung.config import Layer, parse_overrides
from rung.errors import ConfigError
from rung.random import Draw
from rung.recipes.piano.data import prepare
from rung.recipes.piano.ngram import NGram
from rung.recipes.piano.notes import make
from rung.recipes.piano.recipe import Piano
from rung.recipes.piano.samples import Completion, by_ngram, from_row
from rung.recipes.piano.tasks import TASKS, Example, sequences
from rung.recipes.piano.tokenizer import CLS, TOKENIZER, Tokenizer
from rung.resolve import schema_of
from tests.errors import raises_code
from tests.recipes.piano.tunes import to_midpoints, write_store

Rung = Callable[..., CompletedProcess[str]]
SMALL = [
    "system.device=cpu",
    "system.dtype=float32",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "data.context_size=96",
    "data.batch_size=4",
    "data.notes_per_record=8",
    "optimizer.max_iters=2",
    "lr.warmup_iters=0",
    "eval_interval=1",
    "eval_iters=3",
    "sampling.num_tokens=24",
]


def recipe(*overrides: str) -> Piano:
    merged = {one.partition("=")[0]: one for one in (*SMALL, *overrides)}
    config = schema_of("piano", Piano).resolve([Layer("command line", parse_overrides(merged.values()))])
    return Piano(config.view("recipe"), seed=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("data") / "base")


def digests(path: Path, *splits: str) -> set[str]:
    lines = [json.loads(line) for line in (path / "index.jsonl").read_text().splitlines()]
    return {line["digest"] for line in lines if line["split"] in splits}


# Roles of data


def test_the_base_only_validates_and_extras_only_train(base: Path, tmp_path: Path) -> None:
    extra = write_store(tmp_path / "extra", {f"{n}.mid": 100 + n for n in range(12)})
    made = recipe(f"dataset.base_dataset_name={base}", f"dataset.extra_datasets=[{extra}]")
    streams = made.streams()
    used = {record["source"] for record in streams["train"].places(np.arange(streams["train"].num_rows))}
    lines = [json.loads(line) for line in (extra / "index.jsonl").read_text().splitlines()]
    assert used == {line["source"] for line in lines if line["split"] == "train"}
    held = {record["source"] for record in streams["full_val"].places(np.arange(streams["full_val"].num_rows))}
    assert held
    assert all("/" in source for source in held)  # those of the base lie in folders


@pytest.mark.parametrize("stage", ["next_token_pretraining", "piano_task"])
def test_what_the_base_holds_out_is_not_trained_on(base: Path, tmp_path: Path, stage: str) -> None:
    """Every tune of the base lies in the extra set too."""
    extra = write_store(tmp_path / "extra", {f"{n}.mid": n for n in range(48)})
    held_out = digests(base, "validation", "test")
    shared = held_out & digests(extra, "train")
    assert shared, "the two sets must meet for this to mean anything"
    overrides = (f"dataset.base_dataset_name={base}", f"dataset.extra_datasets=[{extra}]", f"stage={stage}")
    made = recipe(*overrides)
    train = made.streams()["train"]
    used = {place["source"] for place in train.places(np.arange(train.num_rows))}
    index = {r["source"]: r["digest"] for r in map(json.loads, (extra / "index.jsonl").read_text().splitlines())}
    assert used
    assert not {index[source] for source in used} & held_out
    assert any(f"{len(shared)} of " in line for line in made.describe("scratch").lines)


@pytest.mark.parametrize("stage", ["next_token_pretraining", "piano_task"])
def test_a_set_that_is_all_held_out_is_left_out_or_refused(base: Path, tmp_path: Path, stage: str) -> None:
    places = [json.loads(line) for line in (base / "index.jsonl").read_text().splitlines()]
    numbers = [int(r["source"].split("/")[1][5:]) + 20 * (r["composer"] == "Chopin")
               for r in places if r["split"] != "train"]  # fmt: skip
    copies = write_store(tmp_path / "copies", {f"{n}.mid": n for n in numbers})
    assert digests(copies, "train") <= digests(base, "validation", "test")
    other = write_store(tmp_path / "other", {f"{n}.mid": 100 + n for n in range(9)})
    overrides = (f"dataset.base_dataset_name={base}", f"stage={stage}")
    with raises_code("data-empty"):
        recipe(*overrides, f"dataset.extra_datasets=[{copies}]").streams()
    both = recipe(*overrides, f"dataset.extra_datasets=[{copies},{other}]").streams()["train"]
    assert both.num_rows == recipe(*overrides, f"dataset.extra_datasets=[{other}]").streams()["train"].num_rows


def test_a_record_in_two_extra_sets_is_trained_on_once(base: Path, tmp_path: Path) -> None:
    one = write_store(tmp_path / "one", {f"{n}.mid": 100 + n for n in range(12)})
    two = write_store(tmp_path / "two", {f"{n}.mid": 106 + n for n in range(12)})
    shared = digests(one, "train") & digests(two, "train")
    assert shared
    made = recipe(f"dataset.base_dataset_name={base}", f"dataset.extra_datasets=[{one},{two}]", "stage=piano_task")
    train = made.streams()["train"]
    assert train.num_rows == 3 * len(digests(one, "train") | digests(two, "train"))  # 24 notes each, in rows of 8
    assert any(
        f"{len(shared)} of " in line and "in another set before it" in line for line in made.describe("scratch").lines
    )


def test_what_cannot_be_compared_with_what_is_held_out_is_named(base: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "plain", {f"{n}.mid": 100 + n for n in range(6)})
    prepare(tmp_path / "plain-midi", tmp_path / "pedal\x1b[31m", sustain=True)
    overrides = (f"dataset.base_dataset_name={base}", f'dataset.extra_datasets=["{tmp_path}/pedal\\e[31m"]')
    made = recipe(*overrides)
    made.streams()
    (line,) = made.describe("scratch").lines
    assert "pedal" in line
    assert "\x1b" not in line


def test_several_extras_are_trained_on_together(base: Path, tmp_path: Path) -> None:
    extras = [
        write_store(tmp_path / name, {f"{name}{n}.mid": first + n for n in range(9)})
        for name, first in [("a", 200), ("b", 300)]
    ]
    alone = [
        recipe(f"dataset.base_dataset_name={base}", f"dataset.extra_datasets=[{e}]").streams()["train"] for e in extras
    ]
    both = recipe(f"dataset.base_dataset_name={base}", f"dataset.extra_datasets=[{extras[0]},{extras[1]}]").streams()
    assert both["train"].num_rows == sum(stream.num_rows for stream in alone)
    assert both["train"].fingerprint not in {stream.fingerprint for stream in alone}


def test_composers_get_sets_of_their_own(base: Path) -> None:
    streams = recipe(f"dataset.base_dataset_name={base}").streams()
    composers = {
        r["composer"]
        for r in map(json.loads, (base / "index.jsonl").read_text().splitlines())
        if r["split"] == "validation"
    }
    assert composers == {"Bach", "Chopin"}, "the split must have both for this to mean anything"
    assert list(streams) == ["train", "full_val", "bach", "chopin"]
    assert streams["bach"].num_rows + streams["chopin"].num_rows == streams["full_val"].num_rows
    assert list(recipe(f"dataset.base_dataset_name={base}", "dataset.eval_composers=[]").streams()) == [
        "train",
        "full_val",
    ]


def test_data_that_is_not_there_names_what_prepares_it(base: Path) -> None:
    with raises_code("no-data") as refused:
        recipe(f"dataset.base_dataset_name={base}", "dataset.extra_datasets=[owner/set]").streams()
    assert "`rung data piano --from FOLDER --name owner/set`" in str(refused.value)
    assert "dataset.extra_datasets" in str(refused.value)


def test_a_setting_that_the_data_does_not_have_is_refused(base: Path) -> None:
    with raises_code("data-mismatch") as refused:
        recipe(f"dataset.base_dataset_name={base}", "dataset.sustain=true").streams()
    assert "dataset.sustain=true" in str(refused.value)
    recipe(f"dataset.base_dataset_name={base}", "dataset.sustain=false").streams()


# Stages


def test_answers_cannot_be_counted_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"loss_masking=finetuning.*stage=piano_task"):
        recipe("loss_masking=finetuning")


def test_tasks_from_a_next_token_scratch_contradict_each_other(base: Path) -> None:
    overrides = f"dataset.base_dataset_name={base}"
    made = recipe("stage=piano_task", overrides)
    (error,) = made.describe("scratch_next_token").errors
    assert "init_from=scratch" in error
    assert not made.describe("scratch").errors
    assert not made.describe("piano/7").errors
    assert not recipe(overrides).describe("scratch_next_token").errors


def test_rows_whose_answers_are_all_cut_off_are_refused(base: Path) -> None:
    overrides = (f"dataset.base_dataset_name={base}", "stage=piano_task", "data.context_size=4")
    with raises_code("bad-range", ConfigError) as refused:
        recipe(*overrides, "loss_masking=finetuning").streams()
    assert "data.context_size=4" in str(refused.value)
    assert "data.notes_per_record=8" in str(refused.value)
    recipe(*overrides).streams()


def test_what_is_not_decided_is_decided_aloud(base: Path) -> None:
    overrides = (
        f"dataset.base_dataset_name={base}",
        "dataset.extra_datasets=['...']",
        "stage=piano_task",
        "tasks=TODO",
    )
    made = recipe(*overrides)
    made.streams()
    text = " ".join(made.describe("scratch").lines)
    assert "the train split of" in text
    assert "all 11 tasks" in text


def test_the_order_of_special_tokens_is_part_of_what_weights_mean(base: Path) -> None:
    made = recipe(f"dataset.base_dataset_name={base}")
    before = made.identity().weights
    specials = Tokenizer().specials
    made.tokenizer = Tokenizer((specials[1], specials[0], *specials[2:]))
    assert made.identity().weights["vocab_size"] == before["vocab_size"]
    assert made.identity().weights["specials"] != before["specials"]
    assert made.identity().weights["tokenizer"] != before["tokenizer"]


# Completions


@pytest.mark.parametrize("stage", ["next_token_pretraining", "piano_task"])
def test_an_eval_can_also_compare_notes(base: Path, stage: str) -> None:
    made = recipe(
        f"dataset.base_dataset_name={base}", f"stage={stage}", "evaluation.completed=1", "evaluation.ngram=true",
        "tasks=[continuation, top_line]",
    )  # fmt: skip
    streams, model = made.streams(), made.model().eval()
    ids = np.unique(np.linspace(0, streams["full_val"].num_rows - 1, 6).astype(int))
    draw = Draw(0, -1, ids)
    batch = {name: torch.from_numpy(a) for name, a in streams["full_val"].gather(ids, draw).items()}
    with torch.no_grad():
        found, again = made.measure(model, batch, draw), made.measure(model, batch, draw)
    assert {"f1", "copy_f1", "ngram_f1", "key_agrees"} <= set(found)
    assert ("top_line_f1" in found) == (stage == "piano_task")
    assert {name: float(total) for name, (total, _) in found.items()} == {n: float(t) for n, (t, _) in again.items()}
    for name, (total, count) in found.items():
        assert np.isfinite(float(total) / float(count)), name
    assert not recipe(f"dataset.base_dataset_name={base}").measure(model, batch, draw)


def test_what_was_played_itself_has_an_f1_of_one(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rung.recipes.piano import samples

    monkeypatch.setattr(samples, "complete", lambda model, prompts, *_: [Completion(p.reference) for p in prompts])
    made = recipe(
        f"dataset.base_dataset_name={base}", "stage=piano_task", "evaluation.completed=1", "data.context_size=300"
    )
    streams, model = made.streams(), made.model()
    ids = np.arange(streams["full_val"].num_rows)
    draw = Draw(0, -1, ids)
    batch = {name: torch.from_numpy(a) for name, a in streams["full_val"].gather(ids, draw).items()}
    found = {name: float(total) / float(count) for name, (total, count) in made.measure(model, batch, draw).items()}
    for choice in made.choices:
        assert found[f"{choice.task.name}_f1"] == 1.0
    assert found["f1"] == found["f1_velocity"] == found["key_agrees"] == 1.0


@pytest.mark.parametrize("stage", ["next_token_pretraining", "piano_task"])
def test_a_completion_does_not_depend_on_what_is_completed_with_it(base: Path, stage: str) -> None:
    made = recipe(
        f"dataset.base_dataset_name={base}", f"stage={stage}", "evaluation.completed=0.7", "evaluation.ngram=true",
        "sampling.temperature=0", "data.context_size=200",
    )  # fmt: skip
    stream, model = made.streams()["full_val"], made.model().eval()
    ids = np.unique(np.linspace(0, stream.num_rows - 1, 9).astype(int))

    def measured(places: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        draw = Draw(seed, -1, places)
        batch = {name: torch.from_numpy(a) for name, a in stream.gather(ids[places], draw).items()}
        with torch.no_grad():
            return {name: np.array([float(x) for x in pair]) for name, pair in made.measure(model, batch, draw).items()}

    whole = measured(np.arange(len(ids)), 0)
    assert 0 < whole["f1"][1] < len(ids)
    alone = [measured(np.array([place]), 5) for place in range(len(ids))]
    for name, pair in whole.items():
        assert sum(one[name] for one in alone if name in one) == pytest.approx(pair), name


def test_what_was_played_is_known_from_the_middle_of_a_window_on() -> None:
    notes = make([0, 0.5, 1.0], [0.4, 0.9, 9.0], [60, 62, 64], [30, 90, 110])
    ids = np.concatenate([[CLS], TOKENIZER.encode(notes)])
    ids = np.append(ids, ids[-1:])[: 2 * (int(np.flatnonzero(ids == TOKENIZER.ids["NOTE_ON_62"])[0]))]
    prompt = from_row(ids)
    assert prompt is not None
    assert TOKENIZER.names[int(prompt.ids[-1])].startswith("VELOCITY")  # the half lies between it and its note
    assert prompt.reference is not None
    assert prompt.reference["pitch"].tolist() == [62, 64]  # the last one sounds on when the window ends
    assert np.array_equal(prompt.reference["velocity"], to_midpoints(notes)["velocity"][1:])
    assert np.allclose(prompt.reference["start"], [0.5, 1.0])


def test_the_3_gram_model_answers_from_where_the_model_does() -> None:
    """One that has learned the piece by heart plays on while the last note of the prompt still sounds."""
    starts = np.arange(40) * 0.25
    notes = make(starts, starts + 0.6, 40 + np.arange(40), 66)
    ngram = NGram([np.concatenate([[CLS], TOKENIZER.encode(notes)])] * 500, order=6)
    task = TASKS["continuation"]
    prompt, target = task.split(notes, (50,), 0)
    row = sequences([Example(task, (50,), prompt, target)])[0]
    asked = from_row(row)
    assert asked is not None
    made = by_ngram(ngram, asked, len(row) - len(asked.ids))
    assert abs(made["start"][0] - target["start"][0]) < 0.005


def test_an_eval_can_also_compare_pieces_from_nothing_with_held_out_ones(base: Path) -> None:
    words = (f"dataset.base_dataset_name={base}", "sampling.num_tokens=200")
    made = recipe(*words, "evaluation.samples=3", "data.end_token=true", "model.sounding_keys=true")
    stream, model = made.streams()["full_val"], made.model().eval()

    def measured(ids: np.ndarray) -> dict[str, float]:
        draw = Draw(0, -1, ids)
        batch = {name: torch.from_numpy(a) for name, a in stream.gather(ids, draw).items()}
        with torch.no_grad():
            return {name: float(total / count) for name, (total, count) in made.measure(model, batch, draw).items()}

    found = measured(np.arange(3))
    assert found == measured(np.arange(3))
    assert 1 < found["voices_real_5"] < found["voices_real_95"] < 1.5  # of the tunes, whose notes hardly overlap
    assert {"most_voices", "notes_per_s", "range", "copied_run", "copied_run_most"} <= set(found)
    assert found["copied_run"] <= found["copied_run_most"]
    assert not measured(np.arange(1, 4))  # once in each set
    with_tasks = recipe(*words, "evaluation.samples=3", "stage=piano_task", "data.context_size=300")
    with_tasks.streams()
    assert "evaluation.samples" in with_tasks.describe("scratch").unused


def test_losses_with_and_without_the_grammar_are_not_the_same_measure(base: Path) -> None:
    plain, masked = (recipe(f"dataset.base_dataset_name={base}", f"loss_grammar={on}") for on in ("false", "true"))
    assert plain.identity().weights == masked.identity().weights
    assert plain.identity().metrics != masked.identity().metrics


def test_a_model_that_is_told_the_keys_is_no_gpt2(base: Path, tmp_path: Path) -> None:
    plain, told = (recipe(f"dataset.base_dataset_name={base}", f"model.sounding_keys={on}") for on in ("false", "true"))
    plain.export_hf(plain.model(), tmp_path / "gpt2")
    with raises_code("not-supported"):
        told.export_hf(told.model(), tmp_path / "hf")
    with raises_code("checkpoint-mismatch"):
        told.load_pretrained(told.model(), tmp_path / "gpt2")
    assert "weights of" in plain.load_pretrained(plain.model(), tmp_path / "gpt2")
    wanted = Piano.config_from_pretrained(tmp_path / "gpt2")["model"]
    assert (wanted["positions"], wanted["sounding_keys"]) == ("learned", False)


# Samples


def test_a_sample_names_the_data_that_was_trained_on(base: Path, tmp_path: Path) -> None:
    extra = write_store(tmp_path / "maestro", {f"{n}.mid": 100 + n for n in range(9)})
    overrides = (f"dataset.base_dataset_name={base}", "data.prefix_tokens=true", "sampling.composer=Bach")
    made = recipe(*overrides, f"dataset.extra_datasets=[{extra}]")
    (prompt,) = made._prompts()
    assert [TOKENIZER.names[int(id)] for id in prompt.ids] == ["<DATASET_MAESTRO>", "<COMPOSER_BACH>", "<CLS>"]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["sampling.task=top_line"], "not-supported"),
        (["sampling.parameters=[4]"], "not-supported"),
        (["stage=piano_task", "sampling.task=topline"], "no-task"),
        (["stage=piano_task", "tasks=[infill]", "sampling.task=top_line"], "no-task"),
        (["sampling.composer=Bach"], "not-supported"),
        (["stage=piano_task", "data.context_size=8"], "too-large"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(base: Path, overrides: list[str], code: str) -> None:
    made = recipe(f"dataset.base_dataset_name={base}", *overrides)
    with raises_code(code):
        made.sample(made.model(), Draw(0, 0, np.arange(1)))


def test_samples_of_tasks_are_of_held_out_pieces(base: Path) -> None:
    made = recipe(
        f"dataset.base_dataset_name={base}", "stage=piano_task", "sampling.num_samples=3", "data.context_size=300"
    )
    samples = made.sample(made.model().eval(), Draw(0, 0, np.arange(1)))
    captions = [sample.caption for sample in samples if sample.name.endswith(".mid")]
    assert [caption.partition(",")[0].partition(":")[0] for caption in captions] == [
        "continuation",
        "top_line",
        "bottom_line",
    ]
    assert all("note F1" in caption for caption in captions)


# From outside


def test_both_stages_from_the_command_line(rung: Rung, base: Path) -> None:
    overrides = (*SMALL, f"dataset.base_dataset_name={base}", "sampling.num_samples=2")
    rung("train", "piano", *overrides)
    more = ("stage=piano_task", "loss_masking=finetuning", "init_from=piano/1", "evaluation.ngram=true")
    done = rung("train", "piano", *overrides[6:], *more)
    assert "weights from" in done.stdout
    assert "evaluation.ngram (evaluation.completed=0 completes no rows)" in done.stdout
    figures = json.loads(rung("eval", "piano/2", "--json").stdout)
    assert list(figures) == ["full_val", "bach", "chopin"]
    whole: dict[str, Any] = figures["full_val"]
    assert {"note_on", "velocity", "time"} <= set(whole)
    assert sum(name in whole for name in ("continuation", "top_line", "infill", "harmonise")) >= 2
    alone = json.loads(rung("train", "piano", *overrides[6:], "stage=piano_task", "loss_masking=finetuning",
                            "init_from=piano/2", "eval_only=true").stdout)  # fmt: skip
    assert alone["full_val"]["loss"] == pytest.approx(whole["loss"])
