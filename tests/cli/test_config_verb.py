"""If this fails, `rung config` shows another value than a run would use, or answers a mistake with a traceback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.cli.config import command, reference
from rung.recipes import CATALOG, find_recipe, presets
from rung.resolve import resolve, schema_of

Rung = Callable[..., subprocess.CompletedProcess[str]]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def ask(*words: str) -> str:
    done = CliRunner().invoke(command, words)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("recipe", CATALOG)
def test_json_has_value_source_and_meaning_of_every_key(recipe: str) -> None:
    rows = json.loads(ask(recipe, "--json", "optimizer.max_iters=77"))
    assert set(rows) == set(schema_of(recipe, find_recipe(recipe)).keys)
    assert all(set(row) == {"value", "source", "doc"} and row["doc"].endswith(".") for row in rows.values())
    assert (rows["optimizer.max_iters"]["value"], rows["optimizer.max_iters"]["source"]) == ("77", "command line")
    assert (rows["lr.lr_decay_iters"]["value"], rows["lr.lr_decay_iters"]["source"]) == (
        "77",
        "derived: from optimizer.max_iters",
    )


def test_sources_of_all_layers_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("lr: {learning_rate: 3e-4, min_lr: 8e-5}\n")
    rows = json.loads(ask("piano", "preset=small", "lr.min_lr=1e-5", "-c", str(file), "--json"))
    assert rows["lr.learning_rate"]["value"] == 3e-4
    assert rows["lr.learning_rate"]["source"] == f"file {file}"
    assert rows["lr.min_lr"]["source"] == "command line"
    assert rows["model.n_layer"]["source"] == "preset small"
    assert rows["seed"]["source"] == "default"


def test_without_a_name_the_tiny_preset_is_taken() -> None:
    assert json.loads(ask("piano", "--json")) == json.loads(ask("piano", "preset=tiny", "--json"))


@pytest.mark.parametrize(
    ("recipe", "preset"), [(name, preset) for name in CATALOG for preset in presets(find_recipe(name))]
)
def test_every_preset_resolves_and_its_listing_is_a_file_that_means_the_same(
    recipe: str, preset: str, tmp_path: Path
) -> None:
    words = [f"preset={preset}", "init_from=2024", "optimizer.max_iters=1.5M tokens, 2 h", "lr.lr_decay_iters=100"]
    expected = resolve(recipe, words).config.tree()
    (tmp_path / "again.yaml").write_text(ask(recipe, *words))
    assert resolve(recipe, [], [tmp_path / "again.yaml"]).config.tree() == expected


def test_every_key_has_a_line_with_its_meaning() -> None:
    lines = ask("piano").splitlines()
    keys = schema_of("piano", find_recipe("piano")).keys
    for found in keys.values():
        assert (
            sum(f"# {found.doc}  [" in line and line.strip().startswith(found.name.split(".")[-1]) for line in lines)
            == 1
        )
    assert [line for line in lines if line.endswith(":")] == list(
        dict.fromkeys(line for line in lines if line.endswith(":"))
    )


# Mistakes, as a user sees them


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["piano", "preset=nope"], "gpt2, small, tiny"),
        (["piano", "preset=smal"], " small?"),
        (["piano", "lr.learning_rat=1"], " lr.learning_rate?"),
        (["pianno"], " piano?"),
        (["piano", "-c", "none.yaml"], "none.yaml"),
        (["piano", "data.batch_size=0"], "data.batch_size=0 "),
        (["piano", "lr.min_lr=1"], "lr.min_lr=1 "),
        (["piano", "seed=1", "seed=2"], "seed "),
        ([], "[missing-recipe]"),
        (["piano", "seed=1", "--markdown"], "[options-conflict]"),
        (["nowhere.at.all:Thing"], "nowhere.at.all"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rung.cli import main

    monkeypatch.setattr("sys.argv", ["rung", "config", *words])
    with pytest.raises(SystemExit) as end:
        main()
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert shown.out == ""
    assert shown.err.startswith("rung: ")
    assert expected in shown.err
    assert shown.err.count("\n") == 1


def test_a_mistake_in_a_process_of_its_own(rung: Rung) -> None:
    done = rung("config", "piano", "preset=nope", "lr.foo=1", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_several_mistakes_are_shown_together(rung: Rung) -> None:
    done = rung("config", "piano", "lr.foo=1", "data.batch_size=x", "model.n_head=0", check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3
    assert "Traceback" not in done.stderr


# The reference


def test_the_page_is_what_the_verb_prints() -> None:
    printed = CliRunner().invoke(cli, ["config", "--markdown"]).output
    assert PAGE.read_text("utf-8") == printed, "the keys have changed: run `rung config --markdown > docs/config.md`"


@pytest.mark.parametrize("recipe", CATALOG)
def test_the_reference_has_every_key_once_with_its_owner(recipe: str) -> None:
    lines = "\n".join(reference([recipe])).splitlines()
    schema = schema_of(recipe, find_recipe(recipe))
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert len(rows) == sum(line.startswith("| `") for line in lines)
    assert set(rows) == set(schema.keys)
    assert (
        rows["data.batch_size"]
        == "| `data.batch_size` | whole number from 1 | `32` | Rows in one forward pass. | engine |"
    )
    for name, row in rows.items():
        assert schema.keys[name].doc.replace("|", "\\|") in row
        assert row.endswith((" | engine |", " | recipe |"))
