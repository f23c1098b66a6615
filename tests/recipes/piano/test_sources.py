"""If this fails, music is read from the wrong place, lands in the wrong split, or a broken download ends a program."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.store import Store, place
from rung.errors import DataError
from rung.recipes.piano.data import digests, prepare
from rung.recipes.piano.midi import write_midi
from rung.recipes.piano.sources import Source, find_source
from tests.conftest import shared_data
from tests.errors import raises_code
from tests.recipes.piano.tunes import notes_of_tune as tune

HUB = "epr-labs/maestro-sustain-v2"
SPLITS = ("train", "validation", "test")


def find(source: Path | str) -> Source:
    return find_source(source, False, None)


def refused(code: str, source: Path | str) -> str:
    """The one sentence that a source is refused with."""
    with raises_code(code, DataError) as caught:
        find(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def reasons(store: Store) -> dict[str, str]:
    return {item["file"]: item["reason"] for item in store.info["quarantined"]}


# Archives


def maestro(num: int = 5) -> dict[str, bytes]:
    """The files of a small MAESTRO by their names."""
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(["canonical_composer", "canonical_title", "split", "year", "midi_filename", "duration"])
    files = {}
    for number in range(num):
        name = f"{2004 + number % 2}/Étude {number}.midi"
        files[f"maestro-v3.0.0/{name}"] = write_midi(tune(number))
        writer.writerow(["Frédéric Chopin", f"Étude, {number}", SPLITS[-number % 3], "2004", name, "3"])
    return files | {"maestro-v3.0.0/maestro-v3.0.0.csv": table.getvalue().encode()}


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in files.items():
            out.writestr(name, data)
    return path


def unpacked(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_maestro_as_it_is_downloaded_is_what_it_is_unpacked(tmp_path: Path) -> None:
    files = maestro()
    desktop = {"__MACOSX/maestro-v3.0.0/2004/._0.midi": b"x", "maestro-v3.0.0/.DS_Store": b"x", "readme.txt": b"hello"}
    prepare(archive(tmp_path / "maestro-v3.0.0-midi.zip", files | desktop), tmp_path / "zip")
    prepare(unpacked(tmp_path / "in", files), tmp_path / "around")
    prepare(tmp_path / "in" / "maestro-v3.0.0", tmp_path / "folder")
    zipped, around, folder = (Store.open(tmp_path / name) for name in ("zip", "around", "folder"))
    assert zipped.info["source"] == "maestro-v3.0.0-midi.zip"
    assert zipped.fingerprint == around.fingerprint, "the folder that it was unpacked in will do"
    assert reasons(zipped) == reasons(around) == reasons(folder) == {}
    fields = ("split", "piece", "composer", "digest")
    assert [[r[f] for f in fields] for r in zipped.index] == [[r[f] for f in fields] for r in folder.index]
    assert zipped.index[0]["source"] == "maestro-v3.0.0/2004/Étude 0.midi"
    assert (zipped.index[0]["piece"], zipped.index[0]["split"]) == ("Frédéric Chopin/Étude, 0", "train")
    assert zipped.splits == folder.splits
    assert {r["split"] for r in zipped.index} == set(SPLITS)


def test_a_table_that_is_not_used_is_named(tmp_path: Path) -> None:
    """Or the publisher's splits would be gone without a word."""
    found = find(archive(tmp_path / "a.zip", maestro() | {"stray.mid": write_midi(tune(9))}))
    assert {take.split for take in found.takes} == {None}
    [item] = found.quarantined
    assert item["file"] == "maestro-v3.0.0/maestro-v3.0.0.csv"
    assert "is not used; pass --from the folder it is in" in item["reason"]


def test_a_table_above_the_folder_is_found(tmp_path: Path) -> None:
    names = ["midi/one.mid", "midi/two.mid", "elsewhere/three.mid"]
    files = {name: write_midi(tune(n)) for n, name in enumerate(names)}
    table = "composer,title,midi\n" + "".join(f"Bach,Fugue,{name}\n" for name in names)
    unpacked(tmp_path / "set", files | {"metadata.csv": table.encode()})
    found = find(tmp_path / "set" / "midi")
    assert [(take.source, take.piece) for take in found.takes] == [("one.mid", "Bach/Fugue"), ("two.mid", "Bach/Fugue")]
    assert found.quarantined == [], "what lies beside the folder was not asked for"
    assert len(find(tmp_path / "set").takes) == 3
    assert find(archive(tmp_path / "a.zip", files | {"metadata.csv": table.encode()})).takes[0].piece == "Bach/Fugue"


def test_any_archive_of_midi_files(tmp_path: Path) -> None:
    files = {f"{composer}/{piece}/{n}.MID": write_midi(tune(hash_of(composer, piece, n)))
             for composer in ("bach", "liszt") for piece in ("one", "two") for n in range(2)}  # fmt: skip
    found = find(archive(tmp_path / "no-suffix", files))
    assert [(take.piece, take.composer) for take in found.takes[:3]] == [
        ("bach/one", "bach"), ("bach/one", "bach"), ("bach/two", "bach"),
    ]  # fmt: skip
    assert all(np.array_equal(take.read(), find(tmp_path / "no-suffix").takes[n].read())
               for n, take in enumerate(found.takes))  # fmt: skip


def hash_of(*parts: object) -> int:
    return sum(ord(letter) * 7**place for place, letter in enumerate("".join(map(str, parts)))) % 10_000


def test_real_performances_out_of_an_archive(tmp_path: Path) -> None:
    asap = shared_data("piano_asap")
    paths = sorted((asap / "midi" / "Bach").rglob("*.mid"))[:4]
    names = {path.relative_to(asap).as_posix(): path for path in [*paths, asap / "metadata.csv"]}
    data = {name: path.read_bytes() for name, path in names.items()}
    takes = find(archive(tmp_path / "a.zip", data)).takes
    same = [take for take in find(asap).takes if take.source in names]
    assert [(t.source, t.piece, t.composer) for t in takes] == [(t.source, t.piece, t.composer) for t in same]
    assert all(np.array_equal(a.read(), b.read()) for a, b in zip(takes, same))


def test_what_is_wrong_with_one_file_of_an_archive_is_named(tmp_path: Path) -> None:
    good = {f"m/{n}.mid": write_midi(tune(n)) for n in range(4)}
    bad = {
        "m/../../out.mid": good["m/0.mid"], "/root.mid": good["m/1.mid"], "C:\\windows.mid": good["m/2.mid"],
        "m/torn.mid": write_midi(tune(11))[:-30], "m/crc.mid": b"MThd" + b"crc-here" * 20,
        "m/\x1b[31mred.mid": b"no music", "m/huge.mid": b"size-here",
    }  # fmt: skip
    path = archive(tmp_path / "a.zip", good | bad)
    data = bytearray(path.read_bytes())
    directory = data.rindex(b"m/crc.mid") - 46
    data[directory + 16] ^= 0xFF  # its checksum
    directory = data.rindex(b"m/huge.mid") - 46
    data[directory + 24 : directory + 28] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    summary = prepare(path, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    why = reasons(store)
    assert {record["source"] for record in store.index} == set(good)
    assert len(why) == len(bad)
    for name in ("m/../../out.mid", "/root.mid", "C:/windows.mid"):
        assert "leads out of the archive" in why[name]
    assert "not a readable MIDI file" in why["m/torn.mid"]
    assert "damaged inside the archive" in why["m/crc.mid"]
    assert "more than 6" in why["m/huge.mid"]
    assert "\x1b" not in summary
    assert not (tmp_path / "out.mid").exists()


def test_names_in_old_code_pages_stay_text(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.zip", {f"{n}-AAAA.mid": write_midi(tune(n)) for n in range(3)})
    data = path.read_bytes()
    for number, raw in enumerate(
        ["Füß".encode(), b"F\xfc\xdf?", b"\xff\xfe\xfd\xfc"]
    ):  # UTF-8 unsaid, Latin-1, neither
        data = data.replace(f"{number}-AAAA".encode(), f"{number}-".encode() + raw.ljust(4, b"x")[:4])
    path.write_bytes(data)
    sources = [take.source for take in find(path).takes]
    assert [name[:2] for name in sources] == ["0-", "1-", "2-"]
    assert all(name.endswith(".mid") and name.encode() for name in sources)
    utf8 = archive(tmp_path / "b.zip", {"Füße.mid": write_midi(tune(0))})
    unsaid = bytearray(utf8.read_bytes())
    for place_of_flags in (6, unsaid.index(b"PK\x01\x02") + 8):
        unsaid[place_of_flags + 1] &= ~0x08
    utf8.write_bytes(unsaid)
    assert [take.source for take in find(utf8).takes] == ["Füße.mid"]


def test_archives_that_cannot_be_used_are_refused_in_one_sentence(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.zip", maestro()).read_bytes()
    (tmp_path / "torn.zip").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.zip").write_bytes(b"")
    (tmp_path / "page.zip").write_bytes(b"<html>404</html>")
    for name in ("torn", "empty", "page"):
        refused("file-damaged", tmp_path / f"{name}.zip")
    assert "none.zip" in refused("no-data", archive(tmp_path / "none.zip", {"a.txt": b"", "__MACOSX/a.mid": b"x"}))
    assert "../a.mid" in refused("no-data", archive(tmp_path / "out.zip", {"../a.mid": b"x"}))
    (tmp_path / "notes.txt").write_text("hello")
    refused("not-supported", tmp_path / "notes.txt")


@pytest.mark.parametrize("has_table", [False, True])
def test_an_encrypted_archive(tmp_path: Path, has_table: bool) -> None:
    files = {name: data for name, data in maestro().items() if has_table or name.endswith(".midi")}
    path = archive(tmp_path / "a.zip", files)
    data = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(mark)
        while at >= 0:
            data[at + flags] |= 1
            at = data.find(mark, at + 4)
    path.write_bytes(data)
    with raises_code("bad-table" if has_table else "data-empty", DataError) as caught:
        prepare(path, tmp_path / "s")
    assert "is encrypted" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s").exists()


@settings(max_examples=60)
@given(st.data())
def test_damaged_bytes_of_an_archive_are_refused_or_quarantined(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("zip")
    whole = bytearray(archive(folder / "a.zip", maestro(3)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / "a.zip").write_bytes(whole[: data.draw(st.sampled_from([len(whole), len(whole), len(whole) - 5]))])
    sentences = []
    try:
        for take in find(folder / "a.zip").takes:
            try:
                take.read()
            except DataError as error:
                sentences.append(str(error))
    except DataError as error:
        sentences.append(str(error))
    assert not any("\n" in sentence for sentence in sentences)


# Data sets of notes


def row(number: int, is_list: bool = False) -> dict[str, Any]:
    notes = tune(number)
    columns = {name: notes[name].tolist() for name in ("start", "end", "pitch", "velocity")}
    columns["duration"] = (notes["end"] - notes["start"]).tolist()
    about = {"composer": ["Bach", "Chopin"][number % 2], "title": f"Étude {number}", "year": 2004, "dataset": "maestro"}
    listed = [dict(zip(columns, values)) for values in zip(*columns.values())]
    return {"notes": listed if is_list else columns, "source": json.dumps(about)}


ROWS = {"train": range(5), "validation": range(5, 7), "test": range(7, 8)}


def saved(path: Path, is_list: bool = False) -> Path:
    from datasets import Dataset, DatasetDict

    sets = {split: Dataset.from_list([row(n, is_list) for n in numbers]) for split, numbers in ROWS.items()}
    DatasetDict(sets).save_to_disk(str(path))
    return path


def parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 2) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def parquets(path: Path, is_list: bool = False) -> Path:
    for split, numbers in ROWS.items():
        parquet(path / "data" / f"{split}-00000-of-00001.parquet", [row(n, is_list) for n in numbers])
    return path


@pytest.mark.parametrize("write", [saved, parquets])
@pytest.mark.parametrize("is_list", [False, True])
def test_rows_of_notes_keep_their_splits(tmp_path: Path, write: Callable[..., Path], is_list: bool) -> None:
    prepare(write(tmp_path / "maestro-sustain", is_list), tmp_path / "s")
    store = Store.open(tmp_path / "s")
    assert store.info["source"] == "maestro-sustain"
    assert reasons(store) == {}
    assert [(r["split"], r["piece"], r["composer"]) for r in store.index] == [
        (split, f"{['Bach', 'Chopin'][n % 2]}/Étude {n}", ["Bach", "Chopin"][n % 2])
        for split, numbers in ROWS.items() for n in numbers
    ]  # fmt: skip
    (tmp_path / "midi").mkdir()
    for number in range(8):
        (tmp_path / "midi" / f"{number}.mid").write_bytes(write_midi(tune(number)))
    prepare(tmp_path / "midi", tmp_path / "m")
    assert {r["digest"] for r in store.index} == {r["digest"] for r in Store.open(tmp_path / "m").index}
    assert digests(store, "validation") == {r["digest"] for r in store.index if r["split"] == "validation"}
    assert digests(store, "nothing") == set()


def test_rows_without_splits_are_split_by_piece(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [row(number) for number in range(5)]
    one = parquet(tmp_path / "notes.parquet", rows)
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "alone"))
    parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", rows)
    for source in (one, tmp_path / "alone", tmp_path / "hub"):
        out = tmp_path / f"store-{source.name}"
        prepare(source, out)
        counts = Store.open(out).info["counts"]
        assert [counts[split]["pieces"] for split in SPLITS] == [3, 1, 1]


def test_a_publisher_without_validation_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a" / "train.parquet", [row(0), row(1)])
    parquet(tmp_path / "a" / "test.parquet", [row(2)])
    summary = prepare(tmp_path / "a", tmp_path / "s")
    assert "validation  empty: its publisher put nothing usable there" in summary


def test_the_hub_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    loaded = datasets.load_from_disk(str(saved(tmp_path / "set")))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or loaded)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_DATA", raising=False)
    prepare(Path(HUB), place(HUB))
    assert asked == [HUB]
    store = Store.open(place(HUB))
    assert store.path == Path("data") / HUB
    assert store.info["source"] == HUB
    assert store.index[0]["source"] == f"{HUB}/train:0"


def test_the_hub_out_of_reach_and_a_set_of_many_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    assert "HF_DATASETS_CACHE" in refused("no-data", "no-such-owner-here/no-such-set")

    def load(name: str) -> None:
        raise ValueError(
            "Config name is missing.\nPlease pick one among the available configs: ['one', 'two']\nExample"
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert "one, two" in refused("not-supported", HUB)


def test_without_the_packages_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = saved(tmp_path / "set"), parquet(tmp_path / "a.parquet", [row(0)])
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for source in (HUB, folder, file):
        assert "pip install 'rung[hf]'" in refused("not-installed", source)


def test_sets_that_hold_something_else(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"text": "hello"}]).save_to_disk(str(tmp_path / "text"))
    for source in (tmp_path / "text", parquet(tmp_path / "text.parquet", [{"text": "hello"}])):
        assert "only text" in refused("no-column", source)
    parquet(tmp_path / "held" / "test.parquet", [row(0)])
    parquet(tmp_path / "held" / "validation.parquet", [row(0)])
    assert "only test, validation" in refused("no-split", tmp_path / "held")
    parquet(tmp_path / "mixed" / "train.parquet", [row(0)])
    parquet(tmp_path / "mixed" / "more.parquet", [row(0)])
    assert "more.parquet" in refused("bad-name", tmp_path / "mixed")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "held" / "test.parquet").read_bytes()[:-9])
    refused("file-damaged", tmp_path / "torn.parquet")
    broken = saved(tmp_path / "broken")
    (broken / "train" / "state.json").write_text("{")
    refused("file-damaged", broken)


def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    def changed(**columns: Any) -> dict[str, Any]:
        return {"notes": {**row(9)["notes"], **columns}, "source": None}

    twelve = [1.0] * 12
    rows = [
        row(0), row(1), row(2),
        changed(end=twelve[:3]), changed(start=[None, *twelve[1:]]), changed(end=[-1.0] * 12),
        changed(pitch=[200] * 12), changed(velocity=None), changed(start=[float("nan")] * 12),
        {"notes": None, "source": "x"}, changed(**{key: [] for key in row(9)["notes"]}),
    ]  # fmt: skip
    prepare(parquet(tmp_path / "a.parquet", rows), tmp_path / "s")
    why = reasons(Store.open(tmp_path / "s"))
    for number, reason in enumerate(
        ["12 starts, 3 ends", "start that is not a number", "ends before it starts", "pitch of 200", "without velocity",
         "start that is not a number", "no notes", "no notes"], start=3,
    ):  # fmt: skip
        assert reason in why[f"a.parquet:{number}"]
    assert len(why) == 8


def test_a_row_may_say_little_of_itself(tmp_path: Path) -> None:
    texts = [None, "no JSON", "[1]", '{"composer": null, "title": ""}', '{"canonical_title": "T"}', "[" * 9999]
    rows = [{"notes": row(n)["notes"], "source": text} for n, text in enumerate(texts)]
    takes = find(parquet(tmp_path / "a.parquet", rows)).takes
    assert [take.piece for take in takes] == [*(f"a.parquet:{n}" for n in range(4)), "/T", "a.parquet:5"]
    without_end = {k: v for k, v in row(0)["notes"].items() if k != "end"}
    take = find(parquet(tmp_path / "b.parquet", [{"notes": without_end}])).takes[0]
    assert np.allclose(take.read()["end"], tune(0)["end"])


# Names


def test_where_a_name_with_an_owner_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_DATA", raising=False)
    assert place(HUB) == Path("data") / HUB
    for path in ("./epr/set", "../epr/set", "data/mine", "a/b/c", "/a/b", "odd name/set", ".hidden/set"):
        assert place(path) == Path(path)
    (tmp_path / "epr-labs").mkdir()
    assert place(HUB) == Path(HUB), "a folder of that name is here, so it is a path"
    (tmp_path / "data" / HUB).mkdir(parents=True)
    assert place(HUB) == Path("data") / HUB, "what is prepared is found"
    (tmp_path / HUB).mkdir()
    assert place(HUB) == Path(HUB), "what is here comes first"
    monkeypatch.setenv("RUNG_DATA", str(tmp_path / "elsewhere"))
    assert place("owner/name") == tmp_path / "elsewhere" / "owner" / "name"


def test_a_set_prepared_under_its_hub_name_is_found_again(
    tmp_path: Path, rung: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    source = archive(tmp_path / "maestro-v3.0.0-midi.zip", maestro())
    done = rung("data", "piano", "--from", source, "--name", HUB)
    assert f"in data/{HUB}" in done.stdout
    assert f"data/{HUB}  piano" in rung("data", "show", HUB).stdout
    again = rung("data", "piano", "--from", source, "--name", HUB, check=False)
    assert again.returncode == 2
    assert HUB in again.stderr
