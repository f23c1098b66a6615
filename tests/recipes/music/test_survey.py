"""If this fails, music is trained on that is silent, untitled or badly coded, and the report did not say so."""

from __future__ import annotations

import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rung.data.store import Store, StoreWriter
from rung.recipes.music.survey import survey
from tests.errors import raises_code

pytest.importorskip("PIL")

RATE, HOP, BOOKS, SIZE = 8000, 80, 4, 16


class Tones:
    """A codec that anyone can follow: the sound of a frame is the sum of its codes, each book half as loud."""

    sample_rate, hop, num_codebooks, codebook_size = RATE, HOP, BOOKS, SIZE

    def decode(self, codes_TC: np.ndarray) -> np.ndarray:
        assert codes_TC.shape[1] <= BOOKS
        weights = 0.5 ** np.arange(1, 1 + codes_TC.shape[1])
        level = (codes_TC / SIZE) @ weights
        tone = np.sin(2 * np.pi * np.arange(HOP) / 16)
        return (level[:, None] * tone).reshape(-1).astype(np.float32)


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def write_store(out: Path, num_records: int = 8, *, sides: int = 1, frames: int = 400, **changed: Any) -> Store:
    """Records of different pieces, the last two held out; `changed` are fields of every record, or books that stick."""
    books = changed.pop("books", {})
    info = changed.pop("info", {})
    rng = np.random.default_rng(0)
    with StoreWriter(out, kind="music") as writer:
        writer.array("codes", np.uint16, (sides * BOOKS,))
        for number in range(num_records):
            codes = rng.integers(0, SIZE, (frames, sides * BOOKS)).astype(np.uint16)
            for book, value in books.items():
                codes[:, book] = value
            split = {num_records - 1: "test", num_records - 2: "validation"}.get(number, "train")
            fields = {
                "piece": f"piece{number}", "source": f"album/song{number}.ogg", "text": f"piano, slow, song {number}",
                "seconds": frames * HOP / RATE, "peak_db": -1.0 - number, "rms_db": -18.0 - number,
                "clipped_share": 0.0, "channels": sides,
            }  # fmt: skip
            split = changed.get("split", split)
            writer.record(split, writer.append("codes", codes), frames, **{
                **fields, **{key: value for key, value in changed.items() if key != "split"}
            })  # fmt: skip
        codec = {"name": "tones", "hash": "0", "sample_rate": RATE, "hop": HOP, "num_codebooks": BOOKS}
        writer.info.update(
            summary="",
            quarantined=[],
            codec={**codec, "codebook_size": SIZE},
            stereo=sides == 2,
            coverage={},
            counts={},
        )
        writer.info.update(info)
    return Store.open(out)


def figures_of(store: Store, out: Path, **options: Any) -> dict[str, Any]:
    survey(store, Tones(), out, quiet, **options)
    figures: dict[str, Any] = json.loads((out / "report.json").read_text())
    return figures


def rules(figures: dict[str, Any]) -> set[str]:
    return {finding["rule"] for finding in figures["findings"]}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("healthy")
    return folder / "report", figures_of(write_store(folder / "music"), folder / "report")


def test_a_healthy_store_has_no_findings(healthy: tuple[Path, dict[str, Any]]) -> None:
    _, figures = healthy
    assert figures["findings"] == []
    assert figures["splits"]["train"] == {"records": 6, "pieces": 6, "tracks": 6, "frames": 2400, "seconds": 24.0}
    assert figures["bits_per_s"] == RATE / HOP * BOOKS * 4
    assert figures["levels"]["rms_db"]["median"] == -20.5
    assert figures["captions"]["with"] == 6
    assert figures["captions"]["tags"][:2] == [["piano", 6], ["slow", 6]]


def test_codes_are_counted(healthy: tuple[Path, dict[str, Any]]) -> None:
    _, figures = healthy
    for book in figures["books"]["train"]:
        assert book["distinct"] == SIZE
        assert book["used_share"] == 1
        assert 15.5 < book["perplexity"] <= 16
        assert book["most_frequent"] == pytest.approx(1 / SIZE, abs=0.03)


def test_every_file_the_page_names_is_there_and_none_besides(healthy: tuple[Path, dict[str, Any]]) -> None:
    out, _ = healthy
    text = (out / "report.md").read_text()
    named = set(re.findall(r"\]\(([^)]+)\)", text))
    assert named | {"report.md"} == {path.name for path in out.iterdir()}
    assert {"levels.svg", "codebooks.svg", "report.html"} <= named
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    assert (out / "report.html").read_text().count("<audio") == len([*out.glob("*.wav")])


def test_excerpts_are_decoded_with_more_and_more_books(healthy: tuple[Path, dict[str, Any]]) -> None:
    out, figures = healthy
    assert [excerpt["split"] for excerpt in figures["excerpts"]] == ["validation", "test"]
    for excerpt in figures["excerpts"]:
        assert [entry["books"] for entry in excerpt["books"]] == [1, 2, 4]
        loudness = []
        for entry in excerpt["books"]:
            with wave.open(str(out / f"{entry['file']}.wav")) as file:
                assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (RATE, 1, 400 * HOP)
                sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)
            loudness.append(np.square(sound).mean())
            assert (out / f"{entry['file']}.png").read_bytes().startswith(b"\x89PNG")
        assert loudness == sorted(loudness)
        assert len(set(loudness)) == 3


def test_stereo_is_heard_as_stereo(tmp_path: Path) -> None:
    store = write_store(tmp_path / "music", sides=2, books={k: 0 for k in range(BOOKS)})  # nothing on the left
    figures = figures_of(store, tmp_path / "report")
    assert figures["bits_per_s"] == 2 * RATE / HOP * BOOKS * 4
    assert figures["excerpts"][0]["books"][0]["bits_per_s"] == 2 * RATE / HOP * 4
    with wave.open(str(tmp_path / "report" / "excerpt1-4.wav")) as file:
        assert file.getnchannels() == 2
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2)
    assert np.abs(sound[:, 0]).max() == 0
    assert np.abs(sound[:, 1]).max() > 1000


def test_the_original_stands_beside_and_is_compared(tmp_path: Path) -> None:
    store = write_store(tmp_path / "music", frames=1000)  # longer than an excerpt, which is taken from the middle

    def original(record: dict[str, Any]) -> np.ndarray:
        codes = store.arrays["codes"][record["start"] : record["start"] + record["length"]]
        return Tones().decode(codes)

    figures = figures_of(store, tmp_path / "report", original=original)
    excerpt = figures["excerpts"][0]
    assert (excerpt["start_s"], excerpt["seconds"]) == (2.0, 6.0)
    assert (tmp_path / "report" / f"{excerpt['original']}.wav").is_file()
    scores = [entry["si_sdr_db"] for entry in excerpt["books"]]
    assert scores == sorted(scores)
    assert scores[-1] > 100  # all books: the original itself
    assert excerpt["books"][-1]["log_mel"] < 1e-3 < excerpt["books"][0]["log_mel"]


def test_an_excerpt_is_taken_where_there_is_sound(tmp_path: Path) -> None:
    store = write_store(tmp_path / "music", frames=3000, sides=2)

    def original(record: dict[str, Any]) -> np.ndarray:
        """A long pause in the middle, and sides that cancel out."""
        side = Tones().decode(store.arrays["codes"][record["start"] : record["start"] + record["length"], :BOOKS])
        side[500 * HOP : 2500 * HOP] = 0
        return np.stack([side, -side], axis=1)

    for excerpt in figures_of(store, tmp_path / "report", original=original)["excerpts"]:
        first = excerpt["start_s"] * RATE / HOP
        assert first == pytest.approx(200) or first == pytest.approx(2200)  # half of it is not in the pause
        assert all(np.isfinite(entry["si_sdr_db"]) for entry in excerpt["books"])


def test_an_original_that_is_silent_all_over_is_not_compared(tmp_path: Path) -> None:
    store = write_store(tmp_path / "music", frames=1000)
    figures = figures_of(store, tmp_path / "report", original=lambda record: np.zeros(record["length"] * HOP))
    assert figures["excerpts"][0]["original"]
    assert "si_sdr_db" not in figures["excerpts"][0]["books"][0]


def test_remarks_are_no_files_that_failed(tmp_path: Path) -> None:
    remarks = [{"file": f"{k}.txt", "reason": "is not UTF-8"} for k in range(4)]
    figures = figures_of(write_store(tmp_path / "music", info={"remarks": remarks}), tmp_path / "report")
    assert rules(figures) == set()
    page = (tmp_path / "report" / "report.md").read_text()
    assert "Every sound file was used" in page
    assert "4 remarks" in page
    assert "3.txt" in page


def test_an_original_that_is_gone_is_done_without(tmp_path: Path) -> None:
    figures = figures_of(write_store(tmp_path / "music"), tmp_path / "report", original=lambda record: None)
    assert figures["excerpts"][0]["original"] is None
    assert "si_sdr_db" not in figures["excerpts"][0]["books"][0]


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("mostly-silent", {"rms_db": -70.0}),
        ("codebook-unused", {"books": {2: 7}}),
        ("captions-missing", {"text": ""}),
        ("captions-alike", {"text": "music"}),
        ("one-piece", {"piece": "the only one"}),
        ("clipped", {"clipped_share": 0.005}),
        ("dc-offset", {"dc_offset": 0.05}),
        ("short-clips", {"seconds": 1.0}),
        ("no-held-out", {"split": "train"}),
        ("many-quarantined", {"info": {"quarantined": [{"file": f"{k}.wav", "reason": "silent"} for k in range(4)]}}),
    ],
)
def test_each_fault_is_found_and_nothing_else(rule: str, changed: dict[str, Any], tmp_path: Path) -> None:
    figures = figures_of(write_store(tmp_path / "music", **changed), tmp_path / "report")
    assert rules(figures) == {rule}


def test_one_code_that_is_nearly_always_there_is_named(tmp_path: Path) -> None:
    store = write_store(tmp_path / "music")
    codes = np.array(store.arrays["codes"])
    with StoreWriter(tmp_path / "uniform", kind="music") as writer:
        writer.array("codes", np.uint16, (BOOKS,))
        codes[np.random.default_rng(1).random(len(codes)) < 0.7, 1] = 3
        writer.append("codes", codes)
        for record in store.index:
            writer.record(**record)
        writer.info.update(store.info)
    assert rules(figures_of(Store.open(tmp_path / "uniform"), tmp_path / "report")) == {"codebook-uniform"}


def test_few_frames_are_not_blamed_for_using_few_codes(tmp_path: Path) -> None:
    figures = figures_of(write_store(tmp_path / "music", frames=1, books={0: 1}), tmp_path / "report")
    assert "codebook-unused" not in rules(figures)


def test_codes_of_another_codec_are_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "music", books={0: SIZE})
    with raises_code("data-mismatch"):
        survey(store, Tones(), tmp_path / "report", quiet)
    assert not (tmp_path / "report").exists()


def test_users_text_stays_text(tmp_path: Path) -> None:
    bad = [{"file": "a|b.wav", "reason": "is <b>silent</b>"}]
    store = write_store(tmp_path / "music", text="<script>x</script> | [a](b)", info={"quarantined": bad})
    survey(store, Tones(), tmp_path / "report", quiet)
    assert "<script>" not in (tmp_path / "report" / "report.html").read_text()
    assert "\\<script>" in (tmp_path / "report" / "report.md").read_text()


def test_a_folder_that_is_no_report_is_left_alone(tmp_path: Path) -> None:
    store = write_store(tmp_path / "music")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "thesis.txt").write_text("mine")
    with raises_code("folder-exists"):
        survey(store, Tones(), tmp_path / "report", quiet)
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["thesis.txt"]
