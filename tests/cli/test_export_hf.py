"""If this fails, what `rung export --hf` writes computes something else in transformers, or half of it is left."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.api import load
from rung.cli import main
from rung.nn import hf
from rung.recipes.piano.tokenizer import CLS, EOGENAI, PAD, VOCAB_SIZE, Tokenizer
from rung.recipes.text import data as text_data_of

transformers = pytest.importorskip("transformers")

SMALL = [
    "system.device=cpu", "optimizer.max_iters=2", "lr.warmup_iters=0", "data.batch_size=4", "eval_iters=1",
    "sampling.num_tokens=4", "system.threads=1", "model.n_layer=2", "model.n_head=2", "model.n_embd=16",
    "data.context_size=24",
]  # fmt: skip
GPT2 = ("model.positions=learned", "model.sounding_keys=false")  # the presets have what no GPT-2 has
SENTENCES = ("The wren nests in the reed.", "A sloop tacks by the quay.", "Rye rises with salt and water.")


def call(*words: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rung", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, piano_data: Path) -> Path:
    """A folder with two runs: piano/1, and text/1 on subwords that were learned from the data."""
    folder = tmp_path_factory.mktemp("place")
    texts = folder / "texts"
    for number, sentence in enumerate(SENTENCES * 8):
        (texts / f"kind{number % 3}").mkdir(parents=True, exist_ok=True)
        (texts / f"kind{number % 3}" / f"{number}.txt").write_text(f"{number}: " + sentence * (5 + number))
    settings = text_data_of.Settings(tokenizer="bpe", vocab_size=300, held_out=0.2)
    text_data_of.prepare(texts, folder / "data" / "text", settings, name="text")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = (f"dataset.base_dataset_name={piano_data}", "model.dropout=0.1", *GPT2, *SMALL)
        assert call("train", "piano", *words) == 0
        assert call("train", "text", *SMALL) == 0
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@torch.no_grad()
def test_a_piano_opens_in_transformers(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", "piano/1", "--hf", "--out", tmp_path / "hf", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["largest_difference"] < 1e-5
    assert sorted(told["files"]) == files_below(tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours = load("piano/1", runs=here / "runs").model.eval()
    ids = torch.randint(VOCAB_SIZE, (3, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=1e-5, rtol=1e-5)
    assert (theirs.config.bos_token_id, theirs.config.pad_token_id, theirs.config.eos_token_id) == (CLS, PAD, EOGENAI)
    made = theirs.generate(torch.tensor([[CLS]]), max_new_tokens=8, do_sample=False)
    assert made.shape[1] <= 9
    vocabulary = json.loads((tmp_path / "hf" / "vocabulary.json").read_text())
    assert vocabulary["names"] == list(Tokenizer().names)
    assert vocabulary["special_ids"] == {"<PAD>": 0, "<CLS>": 1, "<GENAI>": 217, "<EOGENAI>": 218}
    assert vocabulary["tokenizer"] == Tokenizer().description


def test_what_was_exported_is_a_start_again(here: Path, tmp_path: Path, piano_data: Path) -> None:
    from rung.engine.build import build
    from rung.resolve import resolve

    assert call("export", "piano/1", "--hf", "--out", tmp_path / "hf") == 0
    words = [f"dataset.base_dataset_name={piano_data}", f"init_from={tmp_path / 'hf'}", "data.context_size=24"]
    resolved = resolve("piano", [*words, "system.device=cpu"])
    setup = build(resolved.config, resolved.recipe_class, Path("runs"), is_training=False)
    ours = load("piano/1", runs=here / "runs").model.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in setup.state.model.state_dict().items())
    assert any(words.endswith("its token table of 1241 ids") for words in setup.chosen)
    file = tmp_path / "hf" / "vocabulary.json"
    file.write_text(json.dumps({"tokenizer": {"hash": "another"}}))
    setup = build(resolved.config, resolved.recipe_class, Path("runs"), is_training=False)
    assert not any(words.endswith("its token table of 1241 ids") for words in setup.chosen)


@torch.no_grad()
def test_text_goes_with_its_tokenizer(here: Path, tmp_path: Path) -> None:
    assert call("export", "text/1", "--hf", "--out", tmp_path / "hf") == 0
    setup = load("text/1", runs=here / "runs").setup
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours: Any = setup.recipe
    for text in (*SENTENCES, "  two spaces, ümläuts and 四", ""):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.tokenizer.encode(text).tolist()
        assert theirs.decode(ours.tokenizer.encode(text)) == text
    assert theirs.eos_token_id == ours.tokenizer.end
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert model.config.eos_token_id == ours.tokenizer.end
    ids = torch.arange(24)[None]
    torch.testing.assert_close(model(ids).logits, setup.state.model.eval()(ids), atol=1e-5, rtol=1e-5)
    again = load("text/1", runs=here / "runs").setup
    fresh = ours.model()
    assert ours.load_pretrained(fresh, tmp_path / "hf")
    assert all(torch.equal(tensor, again.state.model.state_dict()[name]) for name, tensor in fresh.state_dict().items())


def test_an_earlier_folder_stays_unless_asked(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hf"
    assert call("export", "piano/1", "--hf", "--out", out) == 0
    (out / "mine.txt").write_text("a note")
    assert call("export", "piano/1", "--hf", "--out", out) == 2
    assert "[file-exists]" in capsys.readouterr().err
    assert (out / "mine.txt").exists()
    assert call("export", "piano/1", "--hf", "--out", out, "--replace") == 0
    assert files_below(tmp_path) == ["hf", "hf/config.json", "hf/model.safetensors", "hf/vocabulary.json"]
    for place in (here / "runs", here / "data"):  # folders of something else are never replaced
        assert call("export", "piano/1", "--hf", "--out", place, "--replace") == 2
        assert "[file-exists]" in capsys.readouterr().err
    umask = os.umask(0)
    os.umask(umask)
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")),
        lambda *_: (_ for _ in ()).throw(RuntimeError("I/O error: No space left on device (os error 28)")),
    ],
)
def test_a_full_disk_leaves_what_was_there(
    fault: Callable[..., None], is_there: bool, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "hf"
    if is_there:
        assert call("export", "piano/1", "--hf", "--out", out) == 0
    before = files_below(tmp_path)
    monkeypatch.setattr(hf, "save_file", lambda *_, **__: fault())
    assert call("export", "piano/1", "--hf", "--out", out, "--replace") == 2
    assert "[cannot-write]" in capsys.readouterr().err
    assert files_below(tmp_path) == before


def test_a_wrong_export_is_found_and_not_left(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = hf.save_file

    def wrong(tensors: dict[str, torch.Tensor], *rest: Any, **more: Any) -> None:
        tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"] + 1
        right(tensors, *rest, **more)

    monkeypatch.setattr(hf, "save_file", wrong)
    assert call("export", "piano/1", "--hf", "--out", tmp_path / "new" / "hf") == 2
    assert "[export-mismatch]" in capsys.readouterr().err
    assert files_below(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["piano/1"], "[missing-option]"),
        (["piano/1", "--hf", "--onnx"], "[missing-option]"),
        (["piano/9", "--hf"], "piano/9"),
        (["piano/1", "--hf", "--at", "99"], "99"),
        (["piano/1", "--hf", "--out", "texts/kind0/0.txt/here"], "[cannot-write]"),
        (["piano/1", "--hf", "--out", ".", "--replace"], "[bad-path]"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_below(here)
    assert call("export", *words) == 2
    message = capsys.readouterr().err.strip()
    assert expected in message
    assert "\n" not in message
    assert files_below(here) == before
