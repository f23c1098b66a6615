"""If this fails, a prepared piano set leaks between its splits, loses notes silently or differs from run to run."""

import csv
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rung.data.store import Store
from rung.data.wheel import MUSIC21
from rung.errors import DataError
from rung.recipes.piano.data import prepare, unigram_nats
from rung.recipes.piano.midi import read_midi, write_midi
from rung.recipes.piano.notes import from_zero, in_range, make, quantise
from rung.recipes.piano.tokenizer import CLS, TOKENIZER
from tests.errors import raises_code
from tests.recipes.piano.tunes import notes_of_tune as tune
from tests.recipes.piano.tunes import to_midpoints

SHARED = Path(__file__).parents[3] / ".." / "shared" / "data"


def put(folder: Path, name: str, notes: np.ndarray) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write_midi(notes))


def splits_of_pieces(store: Store) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in store.index:
        found.setdefault(record["piece"], set()).add(record["split"])
    return found


def kept_and_counted(store: Store) -> int:
    dropped = store.info["dropped"]
    kept = sum(record["notes"] for record in store.index)
    return kept + sum(dropped[f"{why}_notes"] for why in ("outside", "merged", "short", "duplicate"))


@pytest.fixture
def asap() -> Path:
    if not (SHARED / "piano_asap").is_dir():
        pytest.skip("needs ../shared/data/piano_asap")
    return SHARED / "piano_asap"


def test_real_performances(asap: Path, tmp_path: Path) -> None:
    summary = prepare(asap, tmp_path / "a", seed=1)
    store = Store.open(tmp_path / "a", kind="piano")
    assert store.verify() == []
    assert store.info["dropped"]["read_notes"] == kept_and_counted(store) == 514_870
    assert sum(c["files"] for c in store.info["counts"].values()) == 158
    assert "514870 notes" in summary
    assert all(len(splits) == 1 for splits in splits_of_pieces(store).values())
    by_folder: dict[str, set[str]] = {}
    for record in store.index:  # by the file names alone, a piece without repeats being the same piece
        by_folder.setdefault(os.path.dirname(record["source"]).removesuffix("_no_repeat"), set()).add(record["split"])
    assert len(by_folder) == 88
    assert all(len(splits) == 1 for splits in by_folder.values())
    assert {r["split"] for r in store.index} == {"train", "validation", "test"}
    assert len({r["composer"] for r in store.index}) == 14

    prepare(asap, tmp_path / "b", seed=1)
    again = Store.open(tmp_path / "b")
    assert again.fingerprint == store.fingerprint
    assert again.info == store.info
    prepare(asap, tmp_path / "c", seed=2)
    assert Store.open(tmp_path / "c").fingerprint != store.fingerprint

    tokens = np.asarray(store.arrays["tokens"])
    assert (tokens[store.starts] == CLS).all()
    assert np.count_nonzero(tokens == CLS) == len(store.index)
    total = np.sum([store.info["histogram"][split] for split in store.splits], axis=0)
    assert np.array_equal(total, np.bincount(tokens, minlength=1241))
    assert 3 < store.info["unigram_nats"]["train"] < 5


def test_a_record_decodes_to_the_notes_of_its_file(asap: Path, tmp_path: Path) -> None:
    prepare(asap / "midi" / "Bach", tmp_path / "s", pause_detection_threshold=0)
    store = Store.open(tmp_path / "s")
    for number in (0, len(store.index) - 1):
        record = store.index[number]
        ids = store.arrays["tokens"][record["start"] : record["start"] + record["length"]]
        notes = in_range(read_midi(asap / "midi" / "Bach" / record["source"]))[0]
        assert np.array_equal(TOKENIZER.decode(ids), to_midpoints(quantise(from_zero(notes))))


def test_pop_songs_are_a_piece_each(tmp_path: Path) -> None:
    if not (SHARED / "piano_pop909").is_dir():
        pytest.skip("needs ../shared/data/piano_pop909")
    prepare(SHARED / "piano_pop909", tmp_path / "s")
    store = Store.open(tmp_path / "s")
    assert len(splits_of_pieces(store)) == 120
    assert [store.info["counts"][s]["pieces"] for s in ("train", "validation", "test")] == [108, 6, 6]
    assert store.info["dropped"]["read_notes"] == kept_and_counted(store) == 200_904


def test_bach_out_of_the_wheel(tmp_path: Path) -> None:
    try:
        MUSIC21.fetch()
    except DataError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")
    reported: list[tuple[str, int, int]] = []
    summary = prepare(None, tmp_path / "s", report=lambda *what: reported.append(what))
    store = Store.open(tmp_path / "s")
    assert len({record["source"] for record in store.index}) == 410
    assert abs(store.info["dropped"]["read_notes"] - 110_354) < 50
    assert store.info["dropped"]["read_notes"] == kept_and_counted(store)
    assert store.info["quarantined"] == []
    assert {record["composer"] for record in store.index} == {"Bach"}
    assert all(len(splits) == 1 for splits in splits_of_pieces(store).values())
    assert reported[-1] == ("reading", 410, 410)
    assert "unigram entropy" in summary


def test_damaged_files_are_quarantined_and_named(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for number in range(4):
        put(source, f"{number}.mid", tune(number))
    (source / "torn.MID").write_bytes(write_midi(tune(9))[:-20])
    (source / "empty.midi").write_bytes(b"")
    put(source, "silent.mid", tune(0)[:0])
    put(source, "stuck.mid", make([0, 1], [700, 2], [60, 62], 64))
    (source / "._0.mid").write_bytes(b"what a desktop leaves behind")
    summary = prepare(source, tmp_path / "s")
    info = Store.open(tmp_path / "s").info
    reasons = {item["file"]: item["reason"] for item in info["quarantined"]}
    assert set(reasons) == {"torn.MID", "empty.midi", "silent.mid", "stuck.mid"}
    assert "no notes" in reasons["silent.mid"]
    assert "700 s" in reasons["stuck.mid"]
    assert "quarantined 4 files" in summary
    assert info["dropped"]["read_notes"] == 48


def test_a_silence_of_days_is_split_at_or_quarantined(tmp_path: Path) -> None:
    """Each second of it would be two tokens."""
    source = tmp_path / "in"
    for number in range(3):
        put(source, f"{number}.mid", tune(number))
    put(source, "torn.mid", np.concatenate([tune(4), tune(5, at=4000)]))
    prepare(source, tmp_path / "split", pause_detection_threshold=4)
    assert Store.open(tmp_path / "split").info["quarantined"] == []
    prepare(source, tmp_path / "whole", pause_detection_threshold=0)
    [left_out] = Store.open(tmp_path / "whole").info["quarantined"]
    assert left_out["file"] == "torn.mid"
    assert "a silence of more than 3600 s; set dataset.pause_detection_threshold" in left_out["reason"]


def test_copies_of_held_out_records_leave_train(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for number in range(40):
        put(source, f"{number:02}.mid", tune(number // 2))  # each tune under two names
    summary = prepare(source, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    where: dict[bytes, set[str]] = {}
    for record in store.index:
        ids = np.asarray(store.arrays["tokens"][record["start"] : record["start"] + record["length"]])
        where.setdefault(ids.tobytes(), set()).add(record["split"])
    assert all(len(splits) == 1 for splits in where.values())
    dropped = store.info["dropped"]
    assert dropped["duplicate_records"] == 40 - len(store.index) > 0
    assert dropped["duplicate_notes"] == 12 * dropped["duplicate_records"]
    assert f"in {dropped['duplicate_records']} copies" in summary
    assert kept_and_counted(store) == dropped["read_notes"]


def test_pauses_short_records_and_foreign_pitches_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "in"
    long = np.concatenate([tune(1), tune(2, at=10), make(30, 31, 60, 64), make([40, 41], [42, 43], [10, 120], 64)])
    put(source, "a.mid", long)
    put(source, "b.mid", tune(3))
    put(source, "c.mid", tune(4))
    prepare(source, tmp_path / "s", pause_detection_threshold=4)
    store = Store.open(tmp_path / "s")
    assert [r["notes"] for r in store.index if r["source"] == "a.mid"] == [12, 12]
    assert len({r["split"] for r in store.index if r["source"] == "a.mid"}) == 1
    dropped = store.info["dropped"]
    assert (dropped["short_records"], dropped["short_notes"], dropped["outside_notes"]) == (1, 1, 2)
    assert dropped["read_notes"] == kept_and_counted(store) == 12 + 12 + 1 + 2 + 24


def pieces(tmp_path: Path, *names: str) -> dict[str, str]:
    source = tmp_path / "in"
    for number, name in enumerate(names):
        put(source, name, tune(number))
    prepare(source, tmp_path / "s")
    return {record["source"]: record["piece"] for record in Store.open(tmp_path / "s").index}


def test_a_piece_is_a_folder_below_a_composer(tmp_path: Path) -> None:
    names = ["m/bach/one/x.mid", "m/bach/one/y.mid", "m/bach/two/x.mid", "m/liszt/one/x.mid"]
    assert list(pieces(tmp_path, *names).values()) == ["bach/one", "bach/one", "bach/two", "liszt/one"]
    composers = {r["source"]: r["composer"] for r in Store.open(tmp_path / "s").index}
    assert list(composers.values()) == ["bach", "bach", "bach", "liszt"]


def test_folders_of_few_files_are_pieces_and_own_their_subfolders(tmp_path: Path) -> None:
    names = ["001/001.mid", "001/versions/v1.mid", "002/002.mid", "003/003.mid"]
    assert list(pieces(tmp_path, *names).values()) == ["001", "001", "002", "003"]


def test_folders_of_many_files_are_composers(tmp_path: Path) -> None:
    names = [f"{composer}/{i:02}.mid" for composer in ("bach", "liszt") for i in range(12)]
    found = pieces(tmp_path, *names, "liszt/p/a.mid", "liszt/p/b.mid")
    assert found["bach/00.mid"] == "bach/00.mid"
    assert found["liszt/p/a.mid"] == found["liszt/p/b.mid"] == "liszt/p"
    assert {r["composer"] for r in Store.open(tmp_path / "s").index} == {"bach", "liszt"}


@pytest.mark.parametrize(("num_pieces", "expected"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (40, [36, 2, 2])])
def test_how_many_pieces_are_held_out(tmp_path: Path, num_pieces: int, expected: list[int]) -> None:
    pieces(tmp_path, *(f"{i}.mid" for i in range(num_pieces)))
    counts = Store.open(tmp_path / "s").info["counts"]
    assert [counts[s]["pieces"] for s in ("train", "validation", "test")] == expected


def maestro(source: Path, rows: list[tuple[str, str, str, str]]) -> None:
    with (source / "maestro-v3.0.0.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["canonical_composer", "canonical_title", "split", "year", "midi_filename"])
        writer.writerows([c, t, s, "2004", f] for c, t, s, f in rows)


def test_the_table_of_maestro_is_honoured(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for number in range(4):
        put(source, f"2004/{number}.midi", tune(number))
    maestro(source, [
        ("Frédéric Chopin", "Étude, Op. 10", "test", "2004/0.midi"), ("Bach", "Fugue", "train", "2004/1.midi"),
        ("Bach", "Fugue", "train", "2004/2.midi"), ("Bach", "Gone", "validation", "2004/9.midi"),
    ])  # fmt: skip
    prepare(source, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    assert [(r["source"], r["split"], r["piece"], r["composer"]) for r in store.index] == [
        ("2004/0.midi", "test", "Frédéric Chopin/Étude, Op. 10", "Frédéric Chopin"),
        ("2004/1.midi", "train", "Bach/Fugue", "Bach"),
        ("2004/2.midi", "train", "Bach/Fugue", "Bach"),
    ]
    assert sorted(item["reason"] for item in store.info["quarantined"]) == [
        "listed in maestro-v3.0.0.csv, but missing", "not listed in maestro-v3.0.0.csv",
    ]  # fmt: skip
    maestro(source, [("Bach", "Fugue", "dev", "2004/1.midi")])
    with raises_code("bad-table") as refused:
        prepare(source, tmp_path / "t")
    assert "'dev'" in str(refused.value)


def test_what_cannot_be_prepared_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.mid").write_bytes(b"torn")
    (tmp_path / "bad").mkdir()
    shutil.copy(tmp_path / "a.mid", tmp_path / "bad")
    for source, code in [
        (tmp_path / "empty", "no-data"),
        (tmp_path / "none", "no-folder"),
        (tmp_path / ("n" * 300), "no-folder"),
        (tmp_path / "a.mid", "not-supported"),
        (tmp_path / "bad", "data-empty"),
    ]:
        with raises_code(code, DataError) as refused:
            prepare(source, tmp_path / "out")
        assert "pass --from" in str(refused.value)
    with raises_code("bad-range") as refused:
        prepare(tmp_path / "bad", tmp_path / "out", pause_detection_threshold=-1)
    assert "dataset.pause_detection_threshold=-1" in str(refused.value)
    assert not list(tmp_path.glob("*out*"))


def test_what_lies_in_a_store_does_not_go_with_it(tmp_path: Path) -> None:
    pieces(tmp_path, "a.mid", "b.mid", "c.mid")
    inside = tmp_path / "s" / "midi"
    shutil.copytree(tmp_path / "in", inside)
    with raises_code("options-conflict"):
        prepare(inside, tmp_path / "s", replace=True)
    assert len(list(inside.glob("*.mid"))) == 3


def test_a_store_is_replaced_only_when_asked(tmp_path: Path) -> None:
    pieces(tmp_path, "a.mid", "b.mid", "c.mid")
    with pytest.raises(DataError):
        prepare(tmp_path / "in", tmp_path / "s")
    prepare(tmp_path / "in", tmp_path / "s", replace=True)


def test_unigram_entropy() -> None:
    histogram = np.zeros(1241)
    histogram[[5, 6, 7, 8]] = 3
    histogram[CLS] = 100
    assert math.isclose(unigram_nats(histogram), math.log(4))
    assert unigram_nats(np.zeros(1241)) == 0


def test_pieces_that_are_nearly_the_same_share_a_split(tmp_path: Path) -> None:
    """bwv16.6 and bwv419 are one chorale with another ending; one of them must not judge what learned the other."""
    rng = np.random.default_rng(0)
    tunes = {f"tune{n}": np.cumsum(rng.integers(-3, 4, 80)) + 60 for n in range(40)}
    tunes["cousin"] = np.concatenate([tunes["tune0"][:50] + 5, np.cumsum(rng.integers(-3, 4, 30)) + 65])
    tunes["stranger"] = np.concatenate([tunes["tune2"][:24], np.cumsum(rng.integers(-3, 4, 56)) + 60])  # 12 runs of 68
    for name, pitches in tunes.items():
        starts = np.arange(len(pitches)) * (0.4 if name == "cousin" else 0.25)
        folder = tmp_path / "midi" / name
        folder.mkdir(parents=True)
        (folder / "a.mid").write_bytes(write_midi(make(starts, starts + 0.2, pitches, 64)))
    for seed in range(6):
        summary = prepare(tmp_path / "midi", tmp_path / f"store{seed}", seed=seed)
        store = Store.open(tmp_path / f"store{seed}")
        split_of = {store.index[n]["piece"]: split for split in store.splits for n in store.split(split)}
        assert split_of["cousin"] == split_of["tune0"]
        assert store.info["near_duplicates"] == [["cousin", "tune0"]]
        assert "2 pieces are nearly another one" in summary


def test_twelve_transposed_versions_of_a_piece_share_a_split(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tunes = {f"tune{n}": np.cumsum(rng.integers(-3, 4, 80)) + 60 for n in range(8)}
    tunes |= {f"version{n}": tunes["tune0"] + n + 1 for n in range(11)}
    for name, pitches in tunes.items():
        starts = np.arange(len(pitches)) * 0.25
        folder = tmp_path / "midi" / name
        folder.mkdir(parents=True)
        (folder / "a.mid").write_bytes(write_midi(make(starts, starts + 0.2, pitches, 64)))
    prepare(tmp_path / "midi", tmp_path / "store")
    (group,) = Store.open(tmp_path / "store").info["near_duplicates"]
    assert group == ["tune0", *sorted(f"version{n}" for n in range(11))]
