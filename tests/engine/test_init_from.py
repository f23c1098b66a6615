"""If this fails, a run begins with other weights, or with a model of another shape, than init_from names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.cli import main
from rung.engine.build import build
from rung.engine.checkpoint import Saved, check_identity
from rung.engine.init_from import external_source, find_checkpoint
from rung.errors import CheckpointError
from rung.nn import hf
from rung.nn.transformer import Shape, Transformer
from rung.recipes.piano.tokenizer import VOCAB_SIZE
from rung.resolve import resolve
from tests.contract.cases import CASES
from tests.errors import raises_code

SMALL = [
    "system.device=cpu", "optimizer.max_iters=2", "lr.warmup_iters=0", "data.batch_size=4", "eval_iters=1",
    "sampling.num_tokens=4", "system.threads=1",
]  # fmt: skip
GPT = Shape(vocab_size=VOCAB_SIZE, context_size=40, n_layer=2, n_head=2, n_embd=16)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, piano_data: Path) -> Path:
    """A folder with one run, piano/1: three layers of 24, 40 positions, dropout."""
    folder = tmp_path_factory.mktemp("place")
    words = ["model.n_layer=3", "model.n_head=2", "model.n_embd=24", "model.dropout=0.1", "data.context_size=40"]
    words += [f"dataset.base_dataset_name={piano_data}", *SMALL]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["rung", "train", "piano", "model.init=xavier", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def lively(shape: Shape, seed: int = 3) -> Transformer:
    """A model whose weights are all random."""
    model = Transformer(shape, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items()}


# The keys


def test_the_model_is_that_of_the_run_and_need_not_be_said_again(here: Path) -> None:
    config = resolve("piano", ["init_from=piano/1", "preset=small"]).config
    values, sources = config.values, config.sources
    assert [values[f"model.{name}"] for name in ("n_layer", "n_head", "n_embd")] == [3, 2, 24]
    assert (values["data.context_size"], values["model.context_size"]) == (40, 40)
    assert sources["model.n_layer"] == sources["data.context_size"] == "init_from piano/1"
    assert (values["model.dropout"], sources["model.dropout"]) == (0.1, "preset small")  # a choice of training
    assert (values["model.init"], values["data.batch_size"]) == ("normal", 32)


def test_files_and_words_win_over_it(here: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("init_from: piano/1\nmodel: {n_layer: 5}\n")
    config = resolve("piano", ["model.n_head=4"], [file]).config
    assert [config.values[f"model.{name}"] for name in ("n_layer", "n_head", "n_embd")] == [5, 4, 24]
    assert config.sources["model.n_layer"] == f"file {file}"
    assert config.sources["model.n_embd"] == "init_from piano/1"
    scratch = resolve("piano", ["init_from=scratch"], [file]).config  # the last one counts
    assert scratch.values["model.n_embd"] == 128


@pytest.mark.parametrize("name", ["piano/1", "runs/piano/1", "runs/piano/1/checkpoints/00000002"])
def test_a_run_and_its_checkpoint_tell_the_same(here: Path, name: str) -> None:
    assert find_checkpoint(name, Path("runs")).samefile("runs/piano/1/checkpoints/00000002")
    assert resolve("piano", [f"init_from={name}"]).config.sources["model.n_layer"] == f"init_from {name}"


def test_a_key_that_came_later_is_as_models_were_before(here: Path, tmp_path: Path) -> None:
    save = shutil.copytree("runs/piano/1/checkpoints/00000002", tmp_path / "save")
    state = json.loads((save / "state.json").read_text())
    for key in ("positions", "sounding_keys"):
        del state["config"]["model"][key]
    (save / "state.json").write_text(json.dumps(state))
    values = resolve("piano", [f"init_from={save}", "preset=tiny"]).config.values
    assert [values[f"model.{name}"] for name in ("positions", "sounding_keys", "n_layer")] == ["learned", False, 3]


def test_a_value_that_was_spelled_otherwise_is_read_as_today(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    model = {"memory": ["4@64x48", "8@32x24"], "warp": True}
    (tmp_path / "state.json").write_text(json.dumps({"config": {"model": model}}))
    values = resolve("world", [f"init_from={tmp_path}"]).config.values
    assert (values["model.warp"], values["model.memory"]) == ("last", ["4@64x48", "8@32x24"])


def test_a_name_that_means_nothing_is_left_to_whoever_needs_it(here: Path) -> None:
    config = resolve("piano", ["init_from=piano/9"]).config
    assert config.sources["model.n_layer"] == "preset tiny"


def test_a_run_that_is_gone_on_with_keeps_its_own_keys(here: Path) -> None:
    """Of a run whose config names another one, nothing is read but its own config."""
    from rung.resolve import run_layer
    from rung.runs.query import open_run

    run = open_run("piano/1", Path("runs"))
    layer = run_layer(
        "piano/2", {**run.config(), "init_from": "piano/77"}, {**run.sources(), "init_from": "command line"}
    )
    assert resolve("piano", [], base=[layer]).config.sources["model.n_layer"] == "run piano/2"


def test_where_the_verb_looks_for_runs_the_keys_are_found(here: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from rung.cli import cli

    words = ["check", "piano", "--runs", str(here / "runs"), "--json", "init_from=piano/1", "model.n_head=7"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = CliRunner().invoke(cli, words)
    assert "model.n_embd=24 cannot be shared by model.n_head=7" in str(done.exception)


def test_keys_are_told_where_torch_cannot_be_imported(here: Path) -> None:
    hf.save(lively(GPT), here / "gpt")
    code = """
import sys
sys.modules["torch"] = None
from click.testing import CliRunner
from rung.cli import cli
for recipe, name in (("piano", "piano/1"), ("text", "gpt")):
    done = CliRunner().invoke(cli, ["config", recipe, f"init_from={name}", "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    print(done.output)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"source": "init_from piano/1"' in done.stdout
    assert '"source": "init_from gpt"' in done.stdout


# The weights


def start(data: Path, *words: str) -> Any:
    resolved = resolve("piano", [f"dataset.base_dataset_name={data}", *SMALL, *words])
    return build(resolved.config, resolved.recipe_class, Path("runs"), is_training=False)


def test_a_run_gives_its_weights_and_its_model(here: Path, piano_data: Path) -> None:
    from safetensors.torch import load_file

    setup = start(piano_data, "init_from=piano/1", "model.dropout=0.3")
    saved = load_file("runs/piano/1/checkpoints/00000002/model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights_of(setup.state.model).items())
    assert setup.state.model.shape.dropout == 0.3


def test_a_hugging_face_folder_gives_its_own(here: Path, piano_data: Path, tmp_path: Path) -> None:
    theirs = lively(GPT)
    hf.save(theirs, tmp_path)
    setup = start(piano_data, f"init_from={tmp_path}", "data.context_size=30")
    words = next(words for words in setup.chosen if words.startswith("weights of"))
    assert "its token table of 1241 ids, if its ids mean the same" in words
    assert "the first 30 of its 40 positions" in words
    assert set(setup.derived["weights_from"]["files"]) == {"config.json", "model.safetensors"}
    ids = torch.arange(30)[None]
    torch.testing.assert_close(setup.state.model.eval()(ids), theirs.eval()(ids))


def test_a_text_model_is_a_start_for_piano(here: Path, piano_data: Path, tmp_path: Path) -> None:
    theirs = lively(replace(GPT, vocab_size=300))
    hf.save(theirs, tmp_path)
    setup = start(piano_data, f"init_from={tmp_path}", "data.context_size=40")
    assert any("a token table initialised randomly (300 ids there, 1241 here)" in words for words in setup.chosen)
    given = weights_of(theirs)
    ours = weights_of(setup.state.model)
    assert all(torch.equal(ours[name], given[name]) for name in given if name != "tokens.weight")


def test_a_file_of_nanogpt_gives_its_own(here: Path, piano_data: Path, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"wte": torch.nn.Embedding(VOCAB_SIZE, 8), "wpe": torch.nn.Embedding(40, 8)})
    names = {"ln_1": (8,), "attn.c_attn": (24, 8), "attn.c_proj": (8, 8), "ln_2": (8,), "mlp.c_fc": (32, 8)}
    names |= {"mlp.c_proj": (8, 32)}
    weights = {f"transformer.{name}": tensor for name, tensor in model.state_dict().items()}
    weights |= {f"transformer.h.0.{name}.weight": torch.rand(size) for name, size in names.items()}
    weights["transformer.ln_f.weight"] = torch.ones(8)
    file = tmp_path / "ckpt.pt"
    torch.save({"model": weights, "model_cfg": {"n_head": 2, "n_layer": 1}, "iter_num": 3}, file)
    setup = start(piano_data, f"init_from={file}", "data.context_size=40")
    shape = setup.state.model.shape
    assert (shape.n_layer, shape.n_head, shape.n_embd, shape.bias, shape.mlp) == (1, 2, 8, False, "gelu")
    assert torch.equal(setup.state.model.blocks[0].mlp.up.weight, weights["transformer.h.0.mlp.c_fc.weight"])
    assert list(setup.derived["weights_from"]["files"]) == ["ckpt.pt"]


def test_another_shape_is_refused_with_the_key(here: Path, piano_data: Path, tmp_path: Path) -> None:
    hf.save(lively(GPT), tmp_path)
    with pytest.raises(CheckpointError, match=r"has n_layer=2, this model has n_layer=3; set model\.n_layer=2"):
        start(piano_data, f"init_from={tmp_path}", "model.n_layer=3", "data.context_size=40")
    with pytest.raises(CheckpointError, match=r"set data\.context_size=40 or less"):
        start(piano_data, f"init_from={tmp_path}", "data.context_size=41")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(CheckpointError, match="a model of type 'mamba'"):
        start(piano_data, f"init_from={tmp_path}")


def test_a_recipe_that_takes_none_says_so(tmp_path: Path) -> None:
    hf.save(lively(GPT), tmp_path)
    make, _ = CASES["toy"]
    with raises_code("not-supported"):
        make(tmp_path).setup(f"init_from={tmp_path}")


def test_what_is_no_source_is_said(tmp_path: Path) -> None:
    assert external_source("piano/1") is None
    assert external_source(str(tmp_path)) is None
    with raises_code("cannot-read"):
        external_source("n" * 300)
    with raises_code("no-checkpoint"):
        find_checkpoint("gone", tmp_path)
    with raises_code("no-file"):
        find_checkpoint(str(tmp_path / "ckpt.pt"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with raises_code("no-file") as error:
        find_checkpoint(str(tmp_path), tmp_path)
    assert "config.json" in str(error.value)


# What ids mean


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (["<A>", "<B>", "<C>"], ["<A>", "<C>", "<B>"], r"<B> at place 1 of specials,.* <C>"),
        (["<A>"], ["<A>", "<C>"], r"nothing at place 1 of specials,.* <C>"),
        (["<A>", "<B>"], ["<A>"], r"<B> at place 1 of specials,.* nothing"),
        (None, ["<A>"] * 200, r"specials None,.* list of 200"),
        (None, None, r"tokenizer old,.* new"),
    ],
)
def test_lists_of_names_are_told_by_their_first_difference(before: Any, after: Any, words: str) -> None:
    lists = [{} if one is None else {"specials": one} for one in (before, after)]
    saved = Saved(Path("piano/1"), 3, {}, {"identity": {"tokenizer": "old", **lists[0]}})
    tokenizer = "new" if before == after or None not in (before, after) else "old"
    with raises_code("checkpoint-mismatch") as error:
        check_identity(saved, {"tokenizer": tokenizer, **lists[1]})
    assert re.search(words, str(error.value))
    assert len(str(error.value)) < 300
