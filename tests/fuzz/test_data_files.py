"""If this fails, one odd file that somebody downloaded ends its reader in a traceback, a hang or gigabytes, where one
sentence was due."""

from __future__ import annotations

import io
import json
import resource
import shutil
import sqlite3
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rung.data import midi, musicxml, soundfont, tokenizer
from rung.data.audio import read_audio, read_tags
from rung.data.store import Store, StoreWriter
from rung.engine import checkpoint
from rung.errors import UserError
from rung.nn.hf_layouts import read_layout
from rung.recipes.piano.midi import read_midi, write_midi
from rung.recipes.piano.sources import midi_files
from rung.recipes.speech.sources import files as speech
from rung.recipes.text.sources import files as text
from rung.recipes.world.sources import tables
from rung.remote.bucket import Bucket
from rung.remote.manifest import read_manifest
from rung.script import capture as script_capture
from rung.sweep import plan, state
from rung.trackers import tensorboard, trackio, wandb
from tests.data.test_musicxml import HALVES, TEMPO, note, score
from tests.data.test_soundfont import SUSTAINED, font_bytes
from tests.fuzz.mutate import as_json, damaged, documents, fuzzed
from tests.trackers.test_odd_sources import event_file, wandb_file

MOST_SECONDS = 20  # of CPU for one input: a hang ends the test instead of keeping it
MOST_BYTES = 2 << 30  # of memory besides what the test has taken when it begins


class Reader(NamedTuple):
    """A valid file, and what reads it where it lies; `is_json`: one document, `.jsonl`: one in each line."""

    name: str
    data: bytes
    read: Callable[[Path], Any]


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes((3000 * np.sin(np.arange(800))).astype("<i2").tobytes())
    return file.getvalue()


def flac(kind: str) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, 0.3 * np.sin(np.arange(4000)), 8000, format=kind)
    return file.getvalue()


def mxl() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("score.xml", score([HALVES + TEMPO + note("C4", 2)]))
    return file.getvalue()


def tune() -> bytes:
    from rung.recipes.piano import notes

    starts = np.arange(8) * 0.25
    return bytes(write_midi(notes.make(starts, starts + 0.2, np.arange(60, 68), np.full(8, 70))))


def store(folder: Path) -> Path:
    with StoreWriter(folder / "store", "piano") as writer:
        writer.array("tokens", np.uint16)
        for split in ("train", "validation"):
            writer.record(split, writer.append("tokens", np.arange(5, dtype=np.uint16)), 5, title=split)
        writer.info.update({"summary": "a store", "tokenizer": {"kind": "bytes", "files": []}})
    return folder / "store"


def open_store(path: Path) -> None:
    found = Store.open(path.parent)
    for split in found.splits:
        for record in found.split(split):
            found.index[record]
            found.arrays["tokens"][found.starts[record] : found.starts[record] + found.lengths[record]]
    assert isinstance(found.fingerprint, str)
    found.verify()


def whole(path: Path) -> None:
    checkpoint.load(path.parent)


def sweep_of(path: Path) -> None:
    folder = path.parent if path.name == "sweep.json" else path.parent.parent
    found = plan.load(folder)
    state.states(found)
    state.held_claims(found)


SWEEP = {
    "schema": plan.SCHEMA, "name": "lr", "recipe": "piano", "experiment": "lr", "eval_split": None, "retries": 1,
    "ranks": 1, "launch": {"on": "local"}, "metric": None, "search": None, "why": None, "words": [],
    "points": [{"key": "abc123", "words": ["seed=1"], "varies": {"seed": 1}}],
}  # fmt: skip
CLAIM = {
    "process": {"pid": 1, "host": "h", "boot_id": "b", "namespace": "n", "started": 5}, "taken": "2026-11-18T00:00:00Z",
    "outcome": "failed", "after": {"outcome": "stopped", "text": "x"}, "again": None, "text": "broken", "run": "lr/1",
}  # fmt: skip
MANIFEST = {
    "schema": 1, "kind": "run", "name": "a/1", "uid": "u", "created": "2026-11-18T00:00:00Z", "push": "p",
    "document": {"status": "finished"}, "files": [{"path": "run.json", "bytes": 2, "sha256": "0" * 64, "key": "run.json"}],  # noqa: E501
}  # fmt: skip
LAYOUT = {
    "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
ANNOTATIONS = {
    "annotation": [{"path": "a.wav", "text": "a", "task": "asr", "Q": "?", "speaker": "s", "split": "train"}]
}
TABLE = [{"image": "0.png", "t": 0.1, "pose": [0, 0, 0, 0, 0, 0], "speed": 1.0, "x": [1, 2]} for _ in range(3)]


def nothing(*_: Any) -> None: ...


def table_of(path: Path) -> None:
    found = tables.read_table(path)
    found.times(np.arange(3.0))
    found.poses("opencv")
    found.controls()


def bucket_manifest(path: Path) -> None:
    there = path.parent / "bucket" / "runs" / "a" / "1"
    there.mkdir(parents=True)
    shutil.copy(path, there / "manifest.json")
    read_manifest(Bucket(f"file://{path.parent / 'bucket'}"), "run", "a/1")


def database(path: Path) -> bytes:
    with sqlite3.connect(path) as made:
        made.execute(
            "create table metrics (id integer primary key, timestamp text, run_name text, step integer, metrics text)"
        )
        made.execute("insert into metrics values (1, '2026-11-18T00:00:00', 'r', 3, '{\"loss\": 1.5}')")
        made.execute("create table configs (id integer primary key, run_name text, config text)")
        made.execute("insert into configs values (1, 'r', '{\"lr\": 0.1}')")
    made.close()
    return path.read_bytes()


def histories(found: Iterator[Any]) -> None:
    for history in found:
        assert history.num_rows >= 0


def readers(folder: Path) -> list[Reader]:
    prepared = store(folder)
    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), folder / "x.pt")
    scripted = {"version": 1, "step": 3, "micros": [{"batch": {"dict": []}, "before": {}, "after": {}}], "others": []}
    sound = wav()
    logged = {"loss": "1.5", "_step": "3", "_timestamp": "5.0"}
    claims = "sweep/claims/abc123.1.json"
    font = font_bytes([{**SUSTAINED, 53: 0}])
    played = tune()
    saved = {"step": 3, "files": {name: {"bytes": 2, "sha256": "0" * 64} for name in checkpoint.FILES}}
    words = {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
        "version": "1.0",
        "added_tokens": [],
    }
    return [
        Reader("tune.mid", played, read_midi),
        Reader("sustained.mid", played, lambda path: read_midi(path, sustain=True)),
        Reader("performance.mid", played, lambda path: midi.read_performance(path.read_bytes())),
        Reader("score.musicxml", score([HALVES + TEMPO + note("C4", 2) + note("R", 1)]),
               lambda path: musicxml.read_musicxml(path.read_bytes())),
        Reader("score.mxl", mxl(), lambda path: musicxml.read_musicxml(path.read_bytes())),
        Reader("a.wav", sound, lambda path: (read_tags(path), read_audio(path, 8000))),
        Reader("a.flac", flac("FLAC"), lambda path: (read_tags(path), read_audio(path, 8000))),
        Reader("a.ogg", flac("OGG"), lambda path: (read_tags(path), read_audio(path, 8000))),
        Reader("a.mp3", flac("MP3"), lambda path: (read_tags(path), read_audio(path, 8000))),
        Reader("font.sf2", font, lambda path: soundfont.SoundFont.parse(path.read_bytes())),
        Reader("annotation.json", as_json(ANNOTATIONS), lambda path: speech.from_path(path, nothing)),
        Reader("annotation.jsonl", as_json(ANNOTATIONS["annotation"][0]) + b"\n", lambda path: speech.from_path(path, nothing)),  # noqa: E501
        Reader("metadata.csv", b"file_name,text\na.wav,hello\n", lambda path: speech.from_path(path.parent, nothing)),
        Reader("text.jsonl", b'{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n',
               lambda path: list(text.read_jsonl(path, "x", "c", nothing))),
        Reader("frames.json", as_json(TABLE), table_of),
        Reader("frames.csv", b"image,t,pose,speed\n0.png,0.1,0 0 0 0 0 0,1\n1.png,0.2,0 0 0 0 0 1,1\n", table_of),
        Reader("maestro-v3.0.0.csv", b"canonical_composer,canonical_title,split,year,midi_filename\nB,T,train,2004,tune.mid\n",  # noqa: E501
               lambda path: midi_files.source(midi_files.in_folder(path.parent, False))),
        Reader("store/manifest.json", (prepared / "manifest.json").read_bytes(), open_store),
        Reader("store/index.jsonl", (prepared / "index.jsonl").read_bytes(), open_store),
        Reader("store/splits.json", (prepared / "splits.json").read_bytes(), open_store),
        Reader("00000003/manifest.json", as_json(saved), whole),
        Reader("sweep/sweep.json", as_json(SWEEP), sweep_of),
        Reader(claims, as_json(CLAIM), sweep_of),
        Reader("manifest.json", as_json(MANIFEST), bucket_manifest),
        Reader("hf/config.json", as_json(LAYOUT), lambda path: read_layout(path.parent)),
        Reader("hf/tokenizer.json", as_json(words), lambda path: tokenizer.Tokenizer.of_folder(path.parent)),
        Reader("hf/tokenizer_config.json", b'{"eos_token": {"content": "b"}}',
               lambda path: tokenizer.Tokenizer.of_folder(path.parent)),
        Reader("capture/capture.json", as_json(scripted), lambda path: script_capture.read(path.parent, model, [])),
        Reader("run-x.wandb", (wandb_file(folder / "w", logged, logged) / "run-x.wandb").read_bytes(),
               lambda path: (histories(wandb.read(path, [])), wandb.is_ended(path))),
        Reader("x.tfevents.1", next(event_file(folder / "t", (5.0, 1, {"loss": 1.5})).iterdir()).read_bytes(),
               lambda path: histories(tensorboard.read(path.parent, []))),
        Reader("t.db", database(folder / "made.db"), lambda path: histories(trackio.read([path], []))),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Reader]]:
    folder = tmp_path_factory.mktemp("valid")
    return folder, {reader.name: reader for reader in readers(folder)}


NAMES = [
    "tune.mid", "sustained.mid", "performance.mid", "score.musicxml", "score.mxl", "a.wav", "a.flac", "a.ogg", "a.mp3",
    "font.sf2", "annotation.json", "annotation.jsonl", "metadata.csv", "text.jsonl", "frames.json", "frames.csv",
    "maestro-v3.0.0.csv", "store/manifest.json", "store/index.jsonl", "store/splits.json", "00000003/manifest.json",
    "sweep/sweep.json", "sweep/claims/abc123.1.json", "manifest.json", "hf/config.json", "hf/tokenizer.json",
    "hf/tokenizer_config.json", "capture/capture.json", "run-x.wandb", "x.tfevents.1", "t.db",
]  # fmt: skip
# What the fuzzer, or a person, has found, and what is refused with one sentence since.
FOUND = {
    "store/splits.json": [b'{"train": [0], "validation": [7]}', b'{"train": "x"}', b"[" * 5000],
    "store/index.jsonl": [b'{"start": 0, "length": "x"}\n', b'{"start": -9, "length": 2}\n', b"[" * 5000],
    "sweep/sweep.json": [as_json({**SWEEP, "points": [{"key": [], "words": [], "varies": {}}]}), b"[" * 5000],
    "hf/config.json": [b"[" * 5000, as_json({**LAYOUT, "n_layer": "x"})],
    "frames.json": [b"[" * 5000],
    "annotation.json": [b"[" * 5000],
    "00000003/manifest.json": [b"null", b"[]", b'{"schema": 9}'],
    "manifest.json": [as_json({**MANIFEST, "files": [one]}) for one in (None, [], "x")]
    + [
        as_json({**MANIFEST, "files": [{"path": "a", "bytes": 1, "sha256": "0" * 64, "parts": parts}]})
        for parts in (5, "x", [None], [[1]], [{"bytes": 1, "sha256": "0" * 64}], [{"bytes": 2, "sha256": "0" * 64}])
    ],
}
IS_UNHASHED = {"store/index.jsonl", "store/splits.json"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_no_odd_file_ends_its_reader_in_a_traceback(
    name: str, made: tuple[Path, dict[str, Reader]], tmp_path: Path
) -> None:
    valid, known = made
    reader = known[name]
    changed: Any = damaged(reader.data)
    if name.endswith(".json"):
        changed = st.one_of(documents(json.loads(reader.data)).map(as_json), changed)
    elif name.endswith(".jsonl"):
        rows = [json.loads(line) for line in reader.data.splitlines()]
        changed = st.one_of(documents(rows).map(as_lines), changed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    place = tmp_path / "f"

    def lay(data: bytes) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        file = place / name
        file.parent.mkdir(parents=True)
        if name.startswith("store/"):
            shutil.copytree(valid / "store", place / "store", dirs_exist_ok=True)
        if name.startswith("sweep/claims"):
            (place / "sweep" / "sweep.json").write_bytes(as_json(SWEEP))
        if name.startswith("hf/"):
            (place / "hf" / "tokenizer.json").write_bytes(known["hf/tokenizer.json"].data)
        if name.startswith("maestro"):
            (place / "tune.mid").write_bytes(known["tune.mid"].data)
        if name.startswith(("annotation", "metadata")):
            (place / "a.wav").write_bytes(known["a.wav"].data)
        file.write_bytes(data)
        if name in IS_UNHASHED:  # as one who makes a store to do harm: the sizes in its manifest are right
            manifest = json.loads((place / "store" / "manifest.json").read_bytes())
            manifest["files"][file.name]["bytes"] = len(data)
            (place / "store" / "manifest.json").write_bytes(as_json(manifest))
        return file

    @fuzzed(100)
    @given(changed)
    def run(data: bytes) -> None:
        file = lay(data)
        began = resource.getrusage(resource.RUSAGE_SELF)
        try:
            reader.read(file)
        except UserError as error:
            assert str(error)  # noqa: PT017
        ended = resource.getrusage(resource.RUSAGE_SELF)
        assert ended.ru_utime - began.ru_utime < MOST_SECONDS
        assert sorted(path.name for path in tmp_path.iterdir()) == ["f"]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        try:
            reader.read(lay(reader.data))
        except UserError:
            assert name in ("00000003/manifest.json", "capture/capture.json", "manifest.json")
        for data in FOUND.get(name, ()):
            with pytest.raises(UserError):
                reader.read(lay(data))
        run()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


def as_lines(rows: Any) -> bytes:
    return b"".join(as_json(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))
