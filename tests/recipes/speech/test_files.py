"""If this fails, somebody's recording is lost without a word, gets the wrong transcript, or is read on its side."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rung.data.audio import wav_bytes
from rung.errors import DataError
from rung.recipes.speech.sources import Source
from rung.recipes.speech.sources.files import from_path
from tests.conftest import shared_data
from tests.errors import raises_code

sf = pytest.importorskip("soundfile")
RATE = 16000


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def noise(seed: int = 0, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.3, 0.3, shape or (RATE,)).astype(np.float32)


def clip(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wav_bytes(noise(seed), RATE))
    return path


def annotated(path: Path, entries: Any) -> Path:
    path.write_text(json.dumps(entries))
    return path


def texts(path: Path) -> dict[str, str]:
    return {one.name: one.text for one in from_path(path, quiet).utterances}


def reasons(source: Source) -> dict[str, str]:
    return {item["file"]: item["reason"] for item in source.quarantined}


def read_array(path: Path, array: np.ndarray) -> np.ndarray:
    """What comes of an array that was saved as a .npy with a transcript."""
    np.save(path / "a.npy", array)
    (path / "a.txt").write_text("hello")
    [one] = from_path(path, quiet).utterances
    return one.read()


# Annotations


@pytest.mark.parametrize("form", ["wrapped", "bare", "lines"])
def test_annotations_are_read_in_three_forms(form: str, tmp_path: Path) -> None:
    clip(tmp_path / "in" / "a.wav")
    far = clip(tmp_path / "elsewhere" / "b.wav", seed=1)
    entries = [
        {"path": "in/a.wav", "text": "Hello\nthere.", "speaker": 7},
        {"path": str(far), "text": "a dog", "task": "audiocaption", "Q": "What is heard?", "speaker": "ann"},
        {"path": "./in/a.wav", "text": "yes", "task": "QA", "Q": "Is anyone there?"},
    ]
    if form == "lines":
        path = tmp_path / "set.jsonl"
        path.write_text("\n\n".join(map(json.dumps, entries)) + "\n")
    else:
        path = annotated(tmp_path / "set.json", {"annotation": entries} if form == "wrapped" else entries)
    source = from_path(path, quiet)
    assert [(one.name, one.text, one.task, one.question, one.speaker) for one in source.utterances] == [
        ("in/a.wav", "Hello there.", "asr", "", "7"),
        (str(far), "a dog", "audiocaption", "What is heard?", "ann"),
        ("in/a.wav#2", "yes", "QA", "Is anyone there?", ""),
    ]
    assert source.quarantined == []
    first, second, third = (one.read() for one in source.utterances)
    assert first.tobytes() == third.tobytes() != second.tobytes()
    assert {one.split for one in source.utterances} == {None}


def test_entries_that_cannot_be_used_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    clip(tmp_path / "a.wav")
    good = {"path": "a.wav", "text": "hello"}
    bad: list[Any] = [
        {"path": "gone.wav", "text": "hello"},
        {"path": "x" * 5000, "text": "hello"},
        {"path": "\ud800\x00", "text": "hello"},
        {"path": ".", "text": "a folder"},
        {"text": "hello"},
        {"path": 3, "text": "hello"},
        {"path": "a.wav"},
        {"path": "a.wav", "text": " \n"},
        {"path": "a.wav", "text": ["hello"]},
        {"path": "a.wav", "text": "hello", "task": 3},
        {"path": "a.wav", "text": "hello", "Q": {}},
        {"path": "a.wav", "text": "hello", "speaker": []},
        {"path": "a.wav", "text": "hello", "expand_wav": ["b.wav"]},
        "a.wav",
        None,
    ]
    source = from_path(annotated(tmp_path / "set.json", [good, *bad]), quiet)
    assert [one.name for one in source.utterances] == ["a.wav"]
    assert [item["file"] for item in source.quarantined] == [f"set.json[{n}]" for n in range(1, len(bad) + 1)]
    assert "'gone.wav'" in reasons(source)["set.json[1]"]
    assert "expand_wav" in reasons(source)["set.json[13]"]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    clip(tmp_path / "a.wav")
    (tmp_path / "set.jsonl").write_text('{"path": "a.wav", "text": "one"}\n{"path": "a.wa\n' + "[" * 100_000)
    source = from_path(tmp_path / "set.jsonl", quiet)
    assert [one.text for one in source.utterances] == ["one"]
    assert list(reasons(source)) == ["set.jsonl:2", "set.jsonl:3"]


@pytest.mark.parametrize(
    "content",
    [b"", b'{"annotation": [', b'{"annotation": {}}', b"7", b"\xff\xfe{", pytest.param(b"[" * 100_000, id="deep")],
)
def test_a_file_that_is_no_list_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "set.json").write_bytes(content)
    with raises_code("bad-annotation", DataError) as caught:
        from_path(tmp_path / "set.json", quiet)
    assert '"annotation"' in str(caught.value)


def test_nothing_to_read(tmp_path: Path) -> None:
    with raises_code("no-folder", DataError):
        from_path(tmp_path / "missing", quiet)
    with raises_code("data-empty", DataError):
        from_path(annotated(tmp_path / "set.json", []), quiet)
    with raises_code("data-empty", DataError) as caught:
        from_path(annotated(tmp_path / "set.json", [{"path": "gone.wav", "text": "hello"}]), quiet)
    assert "gone.wav" in str(caught.value)


# Folders


def test_the_nearest_transcript_counts(tmp_path: Path) -> None:
    """Each transcript is taken away in turn; the next one speaks."""
    clip(tmp_path / "in" / "a.wav")
    routes = {
        "in/a.txt": "beside\n",
        "in/metadata.json": json.dumps([{"file_name": "a.wav", "transcript": "near json"}]),
        "in/metadata.jsonl": json.dumps({"path": "a.wav", "sentence": "near jsonl"}) + "\n",
        "in/metadata.csv": "id,label\r\na,near csv\r\n",
        "metadata.json": json.dumps({"in/a.wav": "far json"}),
        "metadata.csv": "a|far csv\n",
    }
    for name, text in routes.items():
        (tmp_path / name).write_text(text)
    for name, text in zip(routes, ["beside", "near json", "near jsonl", "near csv", "far json", "far csv"]):
        assert texts(tmp_path) == {"in/a.wav": text}
        (tmp_path / name).unlink()
    with raises_code("data-empty", DataError) as caught:
        from_path(tmp_path, quiet)
    assert "a.txt" in str(caught.value)


def test_metadata_may_name_speakers_tasks_and_questions(tmp_path: Path) -> None:
    clip(tmp_path / "a.wav")
    clip(tmp_path / "b.wav")
    (tmp_path / "metadata.csv").write_text("path,text,speaker_id,task,Q\na.wav,yes,7,QA,Is it?\nb.wav,hello,8,,\n")
    assert [(one.text, one.speaker, one.task, one.question) for one in from_path(tmp_path, quiet).utterances] == [
        ("yes", "7", "QA", "Is it?"), ("hello", "8", "asr", ""),
    ]  # fmt: skip


def test_annotations_named_as_metadata_are_to_be_passed_themselves(tmp_path: Path) -> None:
    clip(tmp_path / "a.wav")
    path = annotated(tmp_path / "metadata.json", {"annotation": [{"path": "a.wav", "text": "hello"}]})
    with raises_code("data-empty", DataError) as caught:
        from_path(tmp_path, quiet)
    assert "pass --from it" in str(caught.value)
    assert texts(path) == {"a.wav": "hello"}


def test_one_file_is_a_source(tmp_path: Path) -> None:
    clip(tmp_path / "b.wav")
    (tmp_path / "metadata.csv").write_text("a|hello\nb|other\n")
    assert texts(clip(tmp_path / "a.wav")) == {"a.wav": "hello"}


def test_a_clip_without_a_transcript_is_named(tmp_path: Path) -> None:
    for name in ("a10", "a2", "b", "c"):
        clip(tmp_path / f"{name}.wav")
    (tmp_path / "a10.txt").write_text("ten")
    (tmp_path / "a2.txt").write_text("two")
    (tmp_path / "b.txt").write_text(" ")
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "d.m4a").write_bytes(b"x")
    source = from_path(tmp_path, quiet)
    assert [one.name for one in source.utterances] == ["a2.wav", "a10.wav"]
    assert list(reasons(source)) == ["d.m4a", "b.wav", "c.wav", tmp_path.as_posix()]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('a|He said: "Go.\nb|"Why"; he asked\n', {"a.wav": 'He said: "Go.', "b.wav": '"Why"; he asked'}),
        ("a|In 1920.|In nineteen twenty.\nb|No.|\n", {"a.wav": "In nineteen twenty.", "b.wav": "No."}),
        ("a.wav|What is it, then?|12\r\nb.wav|Nothing at all.|7\r\n",
         {"a.wav": "What is it, then?", "b.wav": "Nothing at all."}),
        ("id|text\na|one|two\nb|three\n", {"a.wav": "one", "b.wav": "three"}),
        ("Path;Sentence\na.wav;one\nb.wav;two\n", {"a.wav": "one", "b.wav": "two"}),
        ("path\tsentence\na.wav\tone\nb.wav\ttwo\n", {"a.wav": "one", "b.wav": "two"}),
        ('file_name,transcription\na.wav,"one, two"\nb.wav,"""x"""\n', {"a.wav": "one, two", "b.wav": '"x"'}),
        ("a|one\nno bar here\nb|two\u2028three\n", {"a.wav": "one", "b.wav": "two three"}),
    ],
)  # fmt: skip
def test_tables_with_and_without_a_header(content: str, expected: dict[str, str], tmp_path: Path) -> None:
    clip(tmp_path / "wavs" / "a.wav")
    clip(tmp_path / "wavs" / "b.wav")
    (tmp_path / "metadata.csv").write_bytes(content.encode())
    source = from_path(tmp_path, quiet)
    assert {one.name.removeprefix("wavs/"): one.text for one in source.utterances} == expected
    assert source.quarantined == []


def test_a_transcript_that_was_cut_at_a_comma_is_not_used(tmp_path: Path) -> None:
    clip(tmp_path / "a.wav")
    clip(tmp_path / "b.wav")
    (tmp_path / "metadata.csv").write_text("file,text\na.wav,Yes, of course.\nb.wav,No.\n")
    source = from_path(tmp_path, quiet)
    assert [one.text for one in source.utterances] == ["No."]
    assert "quotes" in reasons(source)["a.wav"]


def test_metadata_about_files_that_are_not_there_is_counted(tmp_path: Path) -> None:
    clip(tmp_path / "a.wav")
    (tmp_path / "metadata.csv").write_text("a|one\nb|two\nc|three\n")
    source = from_path(tmp_path, quiet)
    assert len(source.utterances) == 1
    assert "2 files" in reasons(source)[tmp_path.as_posix()]


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.json", "metadata.jsonl", "x.trans.txt", "a.txt"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\x00", b'{"annotation": 5}', b"[1, null]", b"a", b"|||\n|"])
def test_odd_metadata_never_breaks(name: str, content: bytes, tmp_path: Path) -> None:
    clip(tmp_path / "a.wav")
    clip(tmp_path / "ok.wav")
    (tmp_path / "ok.txt").write_text("fine")
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path)["ok.wav"] == "fine"


def test_librispeech(tmp_path: Path) -> None:
    for name in ("19/198/19-198-0000", "19/198/19-198-0001", "84/121/84-121-0000"):
        path = tmp_path / "dev" / f"{name}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        sf.write(path, noise(), RATE)
    (tmp_path / "dev/19/198/19-198.trans.txt").write_text("19-198-0000 NORTHANGER ABBEY\n19-198-0001 THIS WORK\n")
    (tmp_path / "dev/84/121/84-121.trans.txt").write_text("84-121-0000 GO DO YOU HEAR\n")
    for root in (tmp_path, tmp_path / "dev", tmp_path / "dev" / "19"):
        source = from_path(root, quiet)
        assert [(one.text, one.speaker) for one in source.utterances] == [
            ("NORTHANGER ABBEY", "19"), ("THIS WORK", "19"), ("GO DO YOU HEAR", "84"),
        ][: len(source.utterances)]  # fmt: skip
        assert len(source.utterances) == (2 if root.name == "19" else 3)
        assert source.quarantined == []


def test_a_name_that_is_not_valid_text_can_be_read(tmp_path: Path) -> None:
    clip(tmp_path / "a.wav")
    (tmp_path / "a.txt").write_text("hello")
    for suffix in (b".wav", b".txt"):
        os.rename(os.fsencode(tmp_path) + b"/a" + suffix, os.fsencode(tmp_path) + b"/caf\xe9" + suffix)
    [one] = from_path(tmp_path, quiet).utterances
    assert one.name.isprintable()
    assert len(one.read()) == RATE


# Sound


def test_sound_is_mono_at_16_khz_whatever_the_file(tmp_path: Path) -> None:
    times = np.arange(44100) / 44100
    left, right = 0.4 * np.sin(2 * np.pi * 440 * times), 0.2 * np.sin(2 * np.pi * 880 * times)
    sf.write(tmp_path / "a.flac", np.stack([left, right], axis=1), 44100)
    (tmp_path / "a.txt").write_text("hello")
    [one] = from_path(tmp_path, quiet).utterances
    sound = one.read()
    assert (sound.shape, sound.dtype) == ((RATE,), np.dtype(np.float32))
    power = np.abs(np.fft.rfft(sound)) / len(sound)
    assert power[440] == pytest.approx(0.1, rel=0.02)
    assert power[880] == pytest.approx(0.05, rel=0.02)


def cut_wav(path: Path) -> None:
    path.write_bytes(wav_bytes(noise(), RATE)[: RATE // 2])


@pytest.mark.parametrize(
    ("code", "write"),
    [
        ("audio-truncated", cut_wav),
        ("audio-silent", lambda path: path.write_bytes(wav_bytes(np.zeros(RATE, np.float32), RATE))),
        ("audio-silent", lambda path: path.write_bytes(wav_bytes(np.full(RATE, 0.4, np.float32), RATE))),
        ("audio-silent", lambda path: path.write_bytes(wav_bytes(np.stack([noise(), -noise()], axis=1), RATE))),
        ("audio-clipped", lambda path: path.write_bytes(wav_bytes(np.sign(noise()), RATE))),
        ("audio-empty", lambda path: path.write_bytes(b"")),
        ("audio-not-finite", lambda path: sf.write(path, np.full(RATE, np.nan), RATE, subtype="FLOAT")),
        ("audio-axis", lambda path: sf.write(path, noise(0, 2, 500), RATE)),
        ("too-short", lambda path: path.write_bytes(wav_bytes(noise()[: RATE // 25], RATE))),
        ("not-audio", lambda path: path.write_text("words")),
    ],
)
def test_what_cannot_be_learned_from_is_refused_when_read(code: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.wav")
    [one] = from_path(annotated(tmp_path / "set.json", [{"path": "a.wav", "text": "hello"}]), quiet).utterances
    with raises_code(code, DataError):
        one.read()


def test_arrays_are_read_whichever_axis_is_the_time(tmp_path: Path) -> None:
    mono, stereo = noise(), noise(1, RATE, 2)
    assert read_array(tmp_path, mono).tobytes() == mono.tobytes()
    assert read_array(tmp_path, mono[:, None]).tobytes() == mono.tobytes()
    assert read_array(tmp_path, mono[None]).tobytes() == mono.tobytes()
    mixed = read_array(tmp_path, stereo)
    np.testing.assert_allclose(mixed, stereo.mean(axis=1), atol=1e-6)
    assert read_array(tmp_path, np.asfortranarray(stereo)).tobytes() == mixed.tobytes()
    assert read_array(tmp_path, stereo.T).tobytes() == mixed.tobytes()
    assert read_array(tmp_path, noise(1, 8, 800)).shape == (800,)


@pytest.mark.parametrize("dtype", ["int8", "int16", ">i2", "int32", "uint8", "uint16"])
def test_integers_are_scaled_by_the_range_of_their_type(dtype: str, tmp_path: Path) -> None:
    limits = np.iinfo(np.dtype(dtype))
    half, middle = (int(limits.max) - int(limits.min) + 1) // 2, (int(limits.max) + int(limits.min) + 1) // 2
    array = np.rint(noise().astype(np.float64) * half + middle).astype(dtype)
    np.testing.assert_allclose(read_array(tmp_path, array), noise(), atol=0.6 / half + 1e-7)


def test_floats_of_another_scale_come_within_1(tmp_path: Path) -> None:
    sound = read_array(tmp_path, noise().astype(np.float64) * 32768)
    assert np.abs(sound).max() == pytest.approx(1)


@pytest.mark.parametrize(
    ("code", "array"),
    [
        ("audio-axis", noise(0, 1200, 1000)),
        ("audio-axis", noise(0, 9, 20_000)),
        ("audio-axis", noise(0, 2, 150)),
        ("audio-axis", noise(0, 4, 4, 1000)),
        ("audio-axis", np.float32(0.5)),
        ("audio-empty", np.zeros((0, 2))),
        ("audio-silent", np.zeros(RATE)),
        ("audio-silent", np.full(RATE, 1000, np.int16)),
        ("audio-clipped", np.sign(noise())),
        ("audio-not-finite", np.full(RATE, 1e300)),
        ("too-short", noise(0, 1, 500)),
        ("not-audio", np.zeros(RATE, bool)),
        ("not-audio", np.zeros(RATE, complex)),
        ("audio-damaged", np.array([{"a": 1}] * 3, dtype=object)),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(code: str, array: np.ndarray, tmp_path: Path) -> None:
    with raises_code(code, DataError):
        read_array(tmp_path, array)


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    with raises_code("audio-damaged", DataError):
        read_array(tmp_path, np.array([Trap(tmp_path / "sprung")], dtype=object))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("num_bytes", [0, 4, 40, 130, 5000])
def test_an_array_that_was_cut_is_refused(num_bytes: int, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", noise())
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:num_bytes])
    (tmp_path / "a.txt").write_text("hello")
    [one] = from_path(tmp_path, quiet).utterances
    with raises_code("audio-damaged", DataError):
        one.read()


# Real sets


@pytest.mark.parametrize(
    ("name", "number", "first"),
    [
        ("fsdd", 450, "zero"),
        ("prompts", 170, "Agent logged in."),
        ("ljspeech", 16, "Printing, in the only sense with which we are at present concerned, differs from most"),
        ("librivox", 3, "and mister john dashwood had then leisure to consider how much there might be prudently"),
    ],
)
def test_real_sets_are_read_whole(name: str, number: int, first: str) -> None:
    source = from_path(shared_data(f"speech_{name}"), quiet)
    assert len(source.utterances) == len({one.name for one in source.utterances}) == number
    assert source.utterances[0].text.startswith(first)
    assert [item["reason"][:6] for item in source.quarantined] == ["1 file"]  # SOURCE.txt
    speakers = Counter(one.speaker for one in source.utterances)
    assert speakers == ({"jackson": 150, "nicolas": 150, "theo": 150} if name == "fsdd" else {"": number})
    for one in source.utterances:
        sound = one.read()
        assert (sound.ndim, sound.dtype) == (1, np.dtype(np.float32))
        assert 0.01 < np.abs(sound).max() <= 1
