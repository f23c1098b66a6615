"""If this fails, a row is not what it says: a task with another one's answer, another eval set, a lost note."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.store import Store
from rung.random import Draw
from rung.recipes.piano.data import prepare
from rung.recipes.piano.midi import write_midi
from rung.recipes.piano.notes import HIGHEST, LOWEST, from_zero, make, quantise
from rung.recipes.piano.rows import Augment, Performances, Records, TaskRows, changed, labels_of
from rung.recipes.piano.tasks import TASKS, is_by, parse, prefix_of, read_answer
from rung.recipes.piano.tokenizer import CLS, EOGENAI, GENAI, PAD, TOKENIZER
from tests.recipes.piano.tunes import write_store


def records(store: Store, split: str = "train") -> Records:
    return Records(store, split, np.asarray(store.split(split)), "asap")


@pytest.fixture
def store(piano_data: Path) -> Store:
    return Store.open(piano_data)


def whole_notes(store: Store, split: str = "train") -> list[np.ndarray]:
    tokens = store.arrays["tokens"]
    return [TOKENIZER.decode(tokens[store.starts[n] : store.starts[n] + store.lengths[n]]) for n in store.split(split)]


def test_the_stretches_of_an_eval_set_hold_every_note_with_every_task(store: Store) -> None:
    choices = parse("all")
    rows = TaskRows([records(store)], choices, 8, 512)
    gathered = rows.gather(np.arange(rows.num_rows), Draw(5, -1, np.arange(rows.num_rows)))
    found: dict[int, list[np.ndarray]] = {number: [] for number in range(len(choices))}
    for tokens, number in zip(gathered["tokens"], gathered["task"].tolist()):
        task = choices[number].task
        at = int(np.flatnonzero(tokens == GENAI)[0])
        prompt = TOKENIZER.decode(tokens[:at])
        values = tuple(
            int(name.removeprefix("<PARAMETER_").removesuffix(">"))
            for id in tokens[:at].tolist()
            if (name := TOKENIZER.names[id]).startswith("<PARAMETER_")
        )
        target = read_answer(tokens, task.origin(prompt, values))
        found[number].append(task.join(prompt, target))
    wanted = [
        quantise(from_zero(played[first : first + 8]))
        for played in whole_notes(store)
        for first in range(0, len(played), 8)
        if len(played[first : first + 8]) >= 2
    ]
    for number, made in found.items():
        assert len(made) == len(wanted), choices[number].task.name
        for ours, theirs in zip(made, wanted):
            assert np.array_equal(ours, theirs), choices[number].task.name


def test_a_row_of_an_eval_set_depends_on_its_number_alone(store: Store) -> None:
    rows = TaskRows([records(store)], parse("all"), 16, 256)
    ids = np.arange(rows.num_rows)
    whole = rows.gather(ids, Draw(1, -1, ids))["tokens"]
    some = rows.gather(ids[3:9:2], Draw(2, 77, np.arange(3)))["tokens"]
    assert np.array_equal(whole[3:9:2], some)


def test_an_eval_set_is_the_same_whatever_weighs_in_training(store: Store) -> None:
    once, often = (parse([{"name": "infill", "weight": weight}, "top_line"]) for weight in (1, 3))
    some = [records(store)]
    assert TaskRows(some, once, 16, 256).fingerprint == TaskRows(some, often, 16, 256).fingerprint
    trained = (TaskRows(some, choices, 16, 256, augment=Augment()).fingerprint for choices in (once, often))
    assert len(set(trained)) == 2


def test_a_row_of_training_depends_on_seed_step_and_row(store: Store) -> None:
    rows = TaskRows([records(store)], parse("all"), 16, 256, augment=Augment((0.9, 1.1), 4))
    ids = np.arange(6)
    first = rows.gather(ids, Draw(1, 5, ids))
    again = rows.gather(ids[2:4], Draw(1, 5, ids[2:4]))
    assert np.array_equal(first["tokens"][2:4], again["tokens"])
    assert not np.array_equal(first["tokens"], rows.gather(ids, Draw(1, 6, ids))["tokens"])


def test_tasks_come_as_often_as_they_weigh(store: Store) -> None:
    choices = parse([{"name": "continuation", "weight": 3}, "top_line"])
    rows = TaskRows([records(store)], choices, 16, 256, augment=Augment())
    which = rows.gather(np.zeros(2000, np.int64), Draw(0, 0, np.arange(2000)))["task"]
    assert 0.7 < (which == 0).mean() < 0.8


def test_a_row_that_is_too_long_is_cut_and_counted(store: Store) -> None:
    rows = TaskRows([records(store)], parse(["continuation"]), 16, 40)
    seen = rows.stats(only_answers=True)
    assert seen.cut > 0
    assert seen.longest > 40
    assert rows.gather(np.arange(4), Draw(0, -1, np.arange(4)))["tokens"].shape == (4, 41)
    assert TaskRows([records(store)], parse(["continuation"]), 4, 512).stats(True).cut == 0


def test_answers_end_and_only_padding_follows(store: Store) -> None:
    rows = TaskRows([records(store)], parse("all"), 8, 512)
    for tokens in rows.gather(np.arange(rows.num_rows), Draw(0, -1, np.arange(rows.num_rows)))["tokens"]:
        end = int(np.flatnonzero(tokens == EOGENAI)[0])
        assert (tokens[end + 1 :] == PAD).all()
        assert (tokens[:end] != PAD).all()


def test_takes_of_one_piece_are_one_cluster_and_composers_are_groups(tmp_path: Path) -> None:
    """Else standard errors over pieces are too small."""
    tunes = {f"{who}/piece{n}/take{take}.mid": 9 * n + take + (who == "Bach") * 50
             for who in ("Bach", "Liszt") for n in range(4) for take in range(3)}  # fmt: skip
    some = records(Store.open(write_store(tmp_path / "takes", tunes)))
    wanted = {(record["composer"], record["piece"]) for record in map(some.store.index.__getitem__, some.numbers)}
    assert len(wanted) < len(some.numbers)
    for rows in (Performances(some, 48, Augment(), False), TaskRows([some], parse("all"), 8, 256)):
        ids = np.arange(rows.num_rows)
        folders = [place["source"].rpartition("/")[0] for place in rows.places(ids)]
        clusters, composers = rows.cluster_of(ids).tolist(), [rows.groups[n] for n in rows.group_of(ids)]
        assert len(set(clusters)) == len(set(folders)) == len(set(zip(clusters, folders))) == len(wanted)
        assert composers == [folder.partition("/")[0] for folder in folders]


# Windows


def test_without_augmentation_windows_are_those_of_the_store(store: Store) -> None:
    from rung.data.stream import Windows

    ours, plain = Performances(records(store), 48, Augment(), False), Windows(store, "train", 48, PAD)
    ids = np.arange(plain.num_rows)
    draw = Draw(0, 3, ids)
    assert np.array_equal(ours.gather(ids, draw)["tokens"], plain.gather(ids, draw)["tokens"])


def test_shifted_windows_are_the_same_music_elsewhere(store: Store) -> None:
    plain, shifted = (Performances(records(store), 48, a, False) for a in (Augment(), Augment((), 5)))
    ids = np.arange(plain.num_rows)
    before = plain.gather(ids, Draw(0, 0, ids))["tokens"]
    seen = set()
    for step in range(8):
        after = shifted.gather(ids, Draw(0, step, ids))["tokens"]
        for old, new in zip(before, after):
            was, now = TOKENIZER.decode(old, keep_open=True), TOKENIZER.decode(new, keep_open=True)
            assert np.array_equal(was["start"], now["start"])
            moves = set((now["pitch"].astype(int) - was["pitch"]).tolist())
            assert len(moves) <= 1
            seen |= moves
    assert seen == set(range(-5, 6))


@given(low=st.integers(LOWEST, HIGHEST), width=st.integers(0, 87), most=st.integers(0, 12))
def test_every_shift_that_stays_on_the_keyboard_is_drawn_and_no_other(low: int, width: int, most: int) -> None:
    high = min(low + width, HIGHEST)
    draw = Draw(0, 0, np.arange(400))
    drawn = Augment((), most).draw_shifts(draw, np.full(400, low), np.full(400, high))
    wanted = {shift for shift in range(-most, most + 1) if low + shift >= LOWEST and high + shift <= HIGHEST}
    assert set(drawn.tolist()) == wanted


@settings(max_examples=50)
@given(st.sampled_from([0.5, 0.9, 1.0, 1.05, 2.0]), st.integers(-3, 3))
def test_speed_divides_times(speed: float, shift: int) -> None:
    notes = make([0.0, 1.0, 2.5], [0.5, 2.0, 3.0], [60, 64, 67], [64, 70, 80])
    made = changed(notes, speed, shift)
    assert np.allclose(made["start"], notes["start"] / speed, atol=0.006)
    assert np.array_equal(made["pitch"].astype(int), notes["pitch"].astype(int) + shift)


def test_a_window_at_another_speed_has_the_notes_that_start_in_it(store: Store) -> None:
    rows = Performances(records(store), 400, Augment((1.25,), 0), False)
    plain = Performances(records(store), 400, Augment(), False)
    ids = np.arange(rows.num_rows)
    num_changed = 0
    for step in range(4):
        made = rows.gather(ids, Draw(0, step, ids))["tokens"]
        for old, new in zip(plain.gather(ids, Draw(0, step, ids))["tokens"], made):
            was, now = TOKENIZER.decode(old), TOKENIZER.decode(new)
            if np.array_equal(old, new):
                continue
            num_changed += 1
            assert np.array_equal(now, changed(was, 1.25, 0))
    assert num_changed > len(ids)


@pytest.mark.parametrize("speed", [0.5, 0.9, 1.1, 2.0])
def test_a_window_at_another_speed_misses_nothing_at_its_end(tmp_path: Path, speed: float) -> None:
    """Long notes: those that start near the end of a window end far behind it."""
    starts = np.arange(120) * 0.13
    folder = tmp_path / "midi"
    folder.mkdir()
    for name in "abc":
        notes = make(starts, starts + 2.5, 40 + (np.arange(120) * 7 + ord(name)) % 40, 64)
        (folder / f"{name}.mid").write_bytes(write_midi(notes))
    prepare(folder, tmp_path / "long")
    store = Store.open(tmp_path / "long")
    rows, num = Performances(records(store), 64, Augment((speed,), 0), False), 0
    plain, ids = Performances(records(store), 64, Augment(), False), np.arange(rows.num_rows)
    made, before = (some.gather(ids, Draw(0, 1, ids))["tokens"] for some in (rows, plain))
    for row, place in zip(made, plain.places(ids)):
        if np.array_equal(row, before[place["row"]]):
            continue
        record = next(r for r in store.index if r["start"] == place["start"])
        rest = store.arrays["tokens"][record["start"] + place["offset"] : record["start"] + record["length"]]
        wanted = TOKENIZER.encode(changed(TOKENIZER.decode(rest), speed, 0))  # of all the rest, however long
        wanted = np.concatenate([rest[:1][rest[:1] == CLS], wanted])[:65]
        assert np.array_equal(row[: len(wanted)], wanted)
        assert (row[len(wanted) :] == PAD).all()
        num += 1
    assert num > 3


def test_a_prefix_names_data_set_and_composer(store: Store) -> None:
    rows = Performances(records(store), 48, Augment(), True)
    tokens = rows.gather(np.arange(3), Draw(0, 0, np.arange(3)))["tokens"]
    assert tokens.shape == (3, 49)
    assert [TOKENIZER.names[int(id)] for id in tokens[0, :2]] == ["<DATASET_ASAP>", "<COMPOSER_OTHER>"]


@pytest.mark.parametrize(
    ("dataset", "composer", "names"),
    [
        ("epr-labs/maestro-sustain-v2", "Johann Sebastian Bach", ("MAESTRO", "BACH")),
        ("piano_pop909 midi", "", ("POP909", "OTHER")),
        ("mine", "Jacques Offenbach", ("OTHER", "OTHER")),
        ("GiantMIDI-Piano", "Chopin, Frédéric", ("GIANTMIDI", "CHOPIN")),
    ],
)
def test_names_are_recognised(dataset: str, composer: str, names: tuple[str, str]) -> None:
    made = [TOKENIZER.names[id] for id in prefix_of(dataset, composer)]
    assert made == [f"<DATASET_{names[0]}>", f"<COMPOSER_{names[1]}>"]
    assert is_by("Bach_JS", "bach")


def test_a_task_twice_has_two_names() -> None:
    choices = parse([{"name": "infill", "length": 4}, {"name": "infill", "length": 8}, "top_line"])
    assert labels_of(choices) == ["infill", "infill-2", "top_line"]
    assert set(TASKS) >= {"infill", "top_line"}
