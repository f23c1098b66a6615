"""If this fails, a user cannot give a run a prompt, or the prompt that it gets is another one."""

from __future__ import annotations

import json
from pathlib import Path

import mido
import pytest

from rung.runs.record import amend
from tests.cli.test_train import Rung

ODD = 'it\'s "one", [two] = {3: é} #4 & 🎹 $5 %.mid'


@pytest.fixture
def rung(tmp_path: Path, piano_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rung:
    return Rung(tmp_path, piano_data, monkeypatch, capsys)


@pytest.fixture
def tune(piano_data: Path) -> bytes:
    from rung.data.store import Store
    from rung.recipes.piano.midi import write_midi
    from rung.recipes.piano.tokenizer import Tokenizer

    store = Store.open(piano_data, kind="piano")
    return write_midi(Tokenizer().decode(store.arrays["tokens"][: int(store.lengths[0])])[:10])


def test_a_prompt_with_any_name_is_found_from_where_the_user_stands(rung: Rung, tune: bytes) -> None:
    rung.train("optimizer.max_iters=4", "data.context_size=256")
    folder = rung.folder / "my, tunes"
    folder.mkdir()
    (folder / ODD).write_bytes(tune)
    words = ["sample", "piano/1", "--prompt", f"my, tunes/{ODD}", "--json", "--num", "2", "--temperature", "0.5"]
    made = json.loads(rung(*words, "--top-k", "9", "--top-p", "0.9"))
    assert [Path(row["path"]).name for row in made if row["path"].endswith(".mid")] == ["sample-0.mid", "sample-1.mid"]
    for row in made:
        if Path(row["path"]).suffix in (".mid", ".png"):
            assert row["caption"].startswith("continuation: 10 notes given, ")
            assert row["caption"].endswith(f"temperature 0.5; prompt: {ODD}")
    heard = [m.note for m in mido.MidiFile(made[0]["path"]) if m.type == "note_on" and m.velocity]
    given = [m.note for m in mido.MidiFile(folder / ODD) if m.type == "note_on" and m.velocity]
    assert heard[:10] == given
    assert len(heard) > 10


def test_other_keys_leave_earlier_samples_alone(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")

    def made(*words: str) -> set[str]:
        return {row["path"] for row in json.loads(rung("sample", "piano/1", "--json", *words))}

    plain, cold, colder = made(), made("--temperature", "0.5"), made("sampling.temperature=0.1")
    assert len(plain | cold | colder) == len(plain) + len(cold) + len(colder)
    assert made("--temperature", "0.5") == cold
    assert {str(Path(path).parent) for path in plain} == {"samples/piano/1/4-seed-0"}


def test_a_prompt_that_is_not_there_is_one_sentence_and_nothing_is_written(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")
    (rung.folder / "bad.mid").write_bytes(b"not a MIDI file")
    for words, expected in (
        (["--prompt", "gone.mid"], "gone.mid"),
        (["--prompt", "bad.mid"], "bad.mid"),
        (["--prompt", "a${b}.mid"], "[bad-value]"),
        (["--prompt", "a\udcff.mid"], "[bad-name]"),
        (["--prompt", "bad.mid", "sampling.prompt=other.mid"], "sampling.prompt "),
        (["--temperature", "-1"], "sampling.temperature=-1.0 "),
        (["--num", "0"], "sampling.num_samples=0 "),
        (["--top-p", "2"], "sampling.top_p=2.0 "),
        (["--task", "top_line"], "sampling.task=top_line"),
    ):
        text = rung("sample", "piano/1", *words, "--out", "made", code=2)
        assert expected in text
        assert len(text.splitlines()) == 1
    assert not (rung.folder / "made").exists()


def test_an_option_that_a_recipe_has_not_is_refused_by_name(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")
    amend(rung.run("piano/1").path, recipe="world")
    for option, key in (("--prompt", "sampling.prompt"), ("--top-k", "sampling.top_k")):
        text = rung("sample", "piano/1", option, "5", code=2)
        assert all(part in text for part in (option, key, "[no-key]"))


def test_the_prompt_of_a_run_that_writes_text_is_its_text(rung: Rung, text_data: Path) -> None:
    words = [word for word in rung.words if not word.startswith(("dataset.", "data.batch", "sampling."))]
    rung(
        "train", "text", f"dataset.base_dataset_name={text_data}", *words, "optimizer.max_iters=4", "data.batch_size=4"
    )
    made = json.loads(rung("sample", "text/1", "--prompt", "one, two: [3] # four", "--num", "1", "--json"))
    assert "[prompt]\none, two: [3] # four\n" in Path(made[0]["path"]).read_text()
