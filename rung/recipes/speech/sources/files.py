"""Speech of your own: a list of annotations as JSON, or a folder of sound files with transcripts.

The transcript of a.wav is in a.txt, in a metadata.csv, .json or .jsonl beside it or in a folder above, or in the
*.trans.txt of LibriSpeech; the first of these that says anything counts. A clip without one is of no use and is listed
as quarantined. Arrays saved by numpy.save are read as well, and taken to be at 16 kHz.
"""

from __future__ import annotations

import csv
import io
import os
import tokenize
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rung import parse
from rung.data import folder as folders
from rung.data.audio import MOST_CHANNELS, MOST_SAMPLES, SILENCE_DB, SUFFIXES, check_sound, read_audio, resample
from rung.data.folder import Folder, clean_line, shown
from rung.errors import DataError
from rung.recipe import Report
from rung.recipes.speech.sources import SAMPLE_RATE, TRANSCRIBE, Source, Utterance

ANNOTATIONS = (".json", ".jsonl")
ALL_SUFFIXES = (*SUFFIXES, ".npy")
FILE_KEYS = ("file", "file_name", "path", "id")
TEXT_KEYS = ("text", "transcript", "transcription", "sentence", "label")
SPEAKER_KEYS = ("speaker", "speaker_id")
SPLITS = ("train", "validation", "test")
METADATA = (*folders.METADATA, "*.trans.txt")
SHORTEST_S = 0.05  # the shortest of the 450 spoken digits of FSDD has 0.14 s
LONGER = 100  # times as long as the other axis is what must be the time


def from_path(path: Path, report: Report) -> Source:
    """What a file of annotations lists, what a folder holds, or one sound file with its transcript."""
    if path.is_file() and path.suffix.lower() in ANNOTATIONS:
        found = _from_annotations(path, report)
    elif path.is_file() or path.is_dir():
        found = _from_folder(path, report)
    else:
        raise DataError(
            f"there is no {shown(path)}; pass --from a folder of sound files with transcripts, or a JSON file of "
            "annotations",
            code="no-folder",
        )
    if not found.utterances:
        bad = f"; {found.quarantined[0]['file']}: {found.quarantined[0]['reason']}" if found.quarantined else ""
        wanted = ", ".join(f"*{suffix}" for suffix in ALL_SUFFIXES)
        raise DataError(
            f"no speech that can be used in {shown(path)} (looked for {wanted} with transcripts){bad}; pass --from a "
            "folder or a JSON file of annotations that has some",
            code="data-empty",
        )
    return found


# Annotations


def _from_annotations(path: Path, report: Report) -> Source:
    """{"annotation": [{"path", "text", "task", "Q", "speaker", "split"}, ..]}, the bare list, or a line for each; all
    but path and text may be missing."""
    quarantined: list[dict[str, str]] = []
    entries: list[tuple[str, Any]] = []  # where it is, and what is there
    try:
        text = parse.read_bytes(path, parse.MOST_DATA_BYTES).decode("utf-8-sig")
        if path.suffix.lower() == ".jsonl":
            for number, line in enumerate(text.split("\n"), start=1):
                try:
                    if line.strip():
                        entries.append((f"{shown(path.name)}:{number}", parse.loose_json(line)))
                except ValueError as error:
                    reason = f"is not whole JSON ({error})"
                    quarantined.append({"file": f"{shown(path.name)}:{number}", "reason": reason})
        else:
            listed = parse.loose_json(text, parse.NO_LIMIT)
            listed = listed.get("annotation") if isinstance(listed, dict) else listed
            if not isinstance(listed, list):
                raise ValueError('it holds neither a list nor {"annotation": [..]}')
            entries = [(f"{shown(path.name)}[{number}]", entry) for number, entry in enumerate(listed)]
    except OSError as error:
        problem = f"cannot read {shown(path)}: {error.strerror}"
        raise DataError(f"{problem}; check the file and its permissions", code="no-file") from error
    except ValueError as error:
        problem = f"{shown(path)} is no list of annotations ({error})"
        remedy = 'write {"annotation": [{"path": "a.wav", "text": "what is said"}, ..]} as UTF-8'
        raise DataError(f"{problem}; {remedy}", code="bad-annotation") from error

    utterances: list[Utterance] = []
    times_named: Counter[str] = Counter()
    for number, (where, entry) in enumerate(entries):
        report("listing", number, len(entries))
        try:
            name, fields = _entry(entry)
            file = path.parent / name  # an absolute one stays as it is
            if not os.path.isfile(file):  # unlike Path.is_file, whatever the name
                raise ValueError(f"names {name[:200]!r}, which is not there")
        except ValueError as error:
            quarantined.append({"file": where, "reason": str(error)})
            continue
        # One sound may have several tasks; #2 is how the splits tell that it is the same one.
        name = shown(name)
        times_named[name] += 1
        again = f"#{times_named[name]}" if times_named[name] > 1 else ""
        utterances.append(Utterance(name + again, read=partial(read_speech, file), **fields))
    report("listing", len(entries), len(entries))
    return Source(shown(path.resolve().name), utterances, quarantined)


def _entry(entry: Any) -> tuple[str, dict[str, Any]]:
    """The path, and the other fields of an utterance. Raises ValueError with what is wrong."""
    if not isinstance(entry, dict):
        raise ValueError(f"is {type(entry).__name__}, not an object with path and text")
    path, text = entry.get("path"), entry.get("text")
    if not isinstance(path, str) or not path.strip():
        raise ValueError(f"has no path of a sound file (path is {path!r})")
    if not isinstance(text, str) or not clean_line(text):
        raise ValueError(f"has no text (text is {text!r})")
    task, question, speaker = ("" if entry.get(key) is None else entry[key] for key in ("task", "Q", "speaker"))
    if not isinstance(task, str) or not isinstance(question, str):
        raise ValueError(f"has a task or a Q that is no text ({task!r}, {question!r})")
    if not isinstance(speaker, str | int):
        raise ValueError(f"has a speaker that is neither a name nor a number ({speaker!r})")
    if entry.get("expand_wav"):
        raise ValueError("has expand_wav, a list of further sounds, which is not read; join them into one file")
    split = entry.get("split")
    if split is not None and split not in SPLITS:
        raise ValueError(f"has the split {split!r}; there are {', '.join(SPLITS)}")
    fields = {"text": clean_line(text), "task": clean_line(task) or TRANSCRIBE, "question": clean_line(question)}
    return os.path.normpath(path), fields | {"speaker": clean_line(str(speaker)), "split": split}


# Folders


def _from_folder(path: Path, report: Report) -> Source:
    here = Folder(path if path.is_dir() else path.parent, FILE_KEYS, TEXT_KEYS, metadata=METADATA,
                  parse=parse_metadata, suffixes=ALL_SUFFIXES)  # fmt: skip
    files = list(here.walk()) if path.is_dir() else [path]
    utterances = []
    for number, file in enumerate(files):
        report("listing", number, len(files))
        text, speaker, task, question = here.caption_of(file), "", "", ""
        problem = f"has no transcript; write it to {shown(file.stem)}.txt, or into a metadata.csv"
        for row in here.rows_of(file):
            if None in row:  # where DictReader puts what is more than the header has
                problem = "has a line in the metadata with more columns than its header; put the text into quotes"
                continue
            text = text or _first(row, TEXT_KEYS)
            speaker = speaker or _first(row, SPEAKER_KEYS)
            task, question = task or _first(row, ("task",)), question or _first(row, ("Q", "q"))
        if text := clean_line(text):
            name = shown(file.relative_to(here.root))
            task = task or TRANSCRIBE
            utterances.append(Utterance(name, text, partial(read_speech, file), task, question, speaker))
        else:
            here.quarantine(file, problem)
    report("listing", len(files), len(files))
    if path.is_dir():
        here.list_unmatched()
        here.list_ignored()
    return Source(shown(path.resolve().name), utterances, here.quarantined)


def _first(row: folders.Row, keys: tuple[str, ...]) -> str:
    """The first of the keys that says anything; a label or a speaker may be a number."""
    said = (row[key] for key in keys if isinstance(row.get(key), str | int | float))
    return next(filter(None, (clean_line(str(value)) for value in said)), "")


def parse_metadata(name: str, text: str) -> list[Any]:
    """Rows of metadata.json, .jsonl and .csv, with a header or as LJSpeech writes it, and of LibriSpeech's lists."""
    lines = [line for line in text.split("\n") if line.strip()]
    if name.endswith(".trans.txt"):  # 84-121123-0000 GO DO YOU HEAR: speaker, chapter, number
        rows = [dict(zip(("id", "text"), line.split(None, 1))) for line in lines]
        return [row | {"speaker": row["id"].partition("-")[0]} if row["id"].count("-") == 2 else row for row in rows]
    if not name.endswith(".csv"):
        parsed = folders.parse_rows(name, text)
        if [row.get("file") for row in parsed if isinstance(row, dict)] == ["annotation"]:
            raise ValueError("it is a list of annotations, which may have several for a file; pass --from it")
        return parsed
    for delimiter in (",", "\t", ";"):
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        header = [(column or "").strip().lower() for column in reader.fieldnames or ()]
        if _is_header(header):
            reader.fieldnames = header
            return list(reader)
    # id|text or id|text|normalised, with quotes that mean nothing; the last has numbers as they are spoken. Where a
    # third column is short it is not a transcript but a speaker, or anything else.
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    if cells and _is_header(header := [cell.lower() for cell in cells[0]]):
        return [dict(zip(header, row)) for row in cells[1:]]
    if not cells:
        wanted = f"a header with {' or '.join(FILE_KEYS)} and {' or '.join(TEXT_KEYS)}, or lines of id|text"
        raise ValueError(f"it has neither {wanted}")
    num_characters = [sum(len(row[column]) for row in cells if len(row) > column) for column in (1, 2)]
    column = 2 if 2 * num_characters[1] > num_characters[0] else 1
    return [{"id": row[0], "text": (len(row) > column and row[column]) or row[1]} for row in cells]


def _is_header(columns: list[str]) -> bool:
    return not {*FILE_KEYS}.isdisjoint(columns) and not {*TEXT_KEYS}.isdisjoint(columns)


# Sound


def read_speech(path: Path) -> np.ndarray:
    """float32 (samples,) at 16 kHz, the mean of the channels. Raises DataError."""
    sound = _read_array(path) if path.suffix.lower() == ".npy" else read_audio(path, SAMPLE_RATE)
    name = shown(path.name)
    mono = np.ascontiguousarray(sound.mean(axis=1, dtype=np.float32))
    if len(mono) < SHORTEST_S * SAMPLE_RATE:
        problem = f"{name} lasts {len(mono) / SAMPLE_RATE:.3f} s, less than {SHORTEST_S:g} s"
        raise DataError(f"{problem}; remove it", code="too-short")
    if np.ptp(mono) < 10 ** (SILENCE_DB / 20):
        problem = f"{name} is silent when its {sound.shape[1]} channels are mixed: they cancel out"
        raise DataError(f"{problem}; keep one of them", code="audio-silent")
    return mono


def _read_array(path: Path) -> np.ndarray:
    """(samples, 1 or 2 channels) out of an array of numbers, whichever of its axes is the time."""
    name = shown(path.name)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: a header that lies costs no memory
    except OSError as error:
        problem = f"cannot read {name}: {error.strerror or error}"
        raise DataError(f"{problem}; check the file and its permissions", code="no-file") from error
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        problem = f"{name} is not an array of numbers as numpy.save writes it ({' '.join(str(error).split())})"
        raise DataError(f"{problem}; save it again from one", code="audio-damaged") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{name} is a .npz of several arrays; save each with numpy.save", code="not-audio")
    if array.dtype.kind not in "iuf":
        problem = f"{name} has values of type {array.dtype}, which are no samples"
        raise DataError(f"{problem}; save integers or floats", code="not-audio")
    if not array.size:
        raise DataError(f"{name} is empty: it holds no sound; remove it", code="audio-empty")
    shape = array.shape
    if array.ndim == 2:
        is_clear = min(shape) <= MOST_CHANNELS and max(shape) >= LONGER * min(shape)
        array = array if shape[0] == max(shape) else array.T
    else:
        is_clear = array.ndim == 1
    if not is_clear:
        raise DataError(
            f"{name} has shape {shape}; save it as (samples,) or as (samples, channels) with at most {MOST_CHANNELS} "
            f"channels and at least {LONGER} times as many samples, so that nobody takes one for the other",
            code="audio-axis",
        )
    if array.size > MOST_SAMPLES:
        problem = f"{name} has {array.size} samples, the limit is {MOST_SAMPLES}"
        raise DataError(f"{problem}; cut it into parts", code="too-large")
    sound = np.asarray(array.reshape(len(array), -1)[:, :2])
    is_float = sound.dtype.kind == "f"
    if is_float:
        with np.errstate(over="ignore"):  # what is beyond float32 is refused as infinite
            sound = sound.astype(np.float32)
    else:
        limits = np.iinfo(sound.dtype)
        middle = (int(limits.max) + int(limits.min) + 1) // 2  # 0, or half of the range of an unsigned type
        sound = ((sound.astype(np.float64) - middle) / (int(limits.max) + 1 - middle)).astype(np.float32)
    scale = check_sound(sound, SAMPLE_RATE, name, is_float=is_float)
    return resample(sound / np.float32(scale), SAMPLE_RATE, SAMPLE_RATE)
