"""If this fails, a run uses another value than its user wrote, or a mistake in the config goes unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import Config, Layer, Schema, differences, key, load_file, parse_overrides, section
from rung.errors import ConfigError
from rung.units import Budget
from tests.errors import raises_code


@dataclass
class EngineData:
    batch_size: int = key(32, "Rows.", low=1)


@dataclass
class Rates:
    learning_rate: float = key(1e-3, "Peak.", low=0)
    min_lr: float = key(0.0, "Floor.", low=0)
    horizon: Budget = key("${max_iters}", "End of the decay.")
    schedule: Literal["cosine", "linear"] = key("cosine", "Shape.")

    def check(self) -> Iterator[str]:
        if self.min_lr > self.learning_rate:
            yield f"lr.min_lr={self.min_lr:g} is above lr.learning_rate={self.learning_rate:g}"


@dataclass
class Machine:
    max_iters: Budget = key("2000", "Length.")
    compile: bool = key(False, "Compile.")
    threads: int | None = key(None, "Threads.", low=1)
    data: EngineData = section(EngineData, "Batches.")
    lr: Rates = section(Rates, "The rate.")


@dataclass
class ModelData:
    context_size: int = key(256, "Tokens in a row.", low=2)
    folder: str = key("piano", "Where.")


@dataclass
class Net:
    n_embd: int = key(128, "Width.", low=1)
    context_size: int = key("${data.context_size}", "Positions.")
    dropout: float = key(0.0, "Share.", low=0, high=0.9)
    noise: float = key(0.0, "No limits.")
    widths: list[int] = key([1, 2], "Widths.", low=1)
    weights: dict[str, float] = key({}, "By task.")


@dataclass
class Own:
    data: ModelData = section(ModelData, "Rows.")
    model: Net = section(Net, "The network.")

    def check(self) -> Iterator[str]:
        if self.model.context_size != self.data.context_size:
            yield "model.context_size and data.context_size differ"


SCHEMA = Schema({"engine": Machine, "recipe": Own}, "rung config piano")


def resolve(*words: str, layers: tuple[Layer, ...] = ()) -> Config:
    return SCHEMA.resolve([*layers, Layer("command line", parse_overrides(words))])


def mistakes(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(*words)
    return str(caught.value).splitlines()


# Layers and sources


def test_two_owners_share_a_section_and_each_sees_its_own_type() -> None:
    config = resolve("data.batch_size=8", "data.context_size=64")
    engine, recipe = config.view("engine"), config.view("recipe")
    assert isinstance(engine, Machine)
    assert isinstance(recipe, Own)
    assert isinstance(engine.data, EngineData)
    assert (engine.data.batch_size, recipe.data.context_size) == (8, 64)
    assert not hasattr(engine.data, "context_size")
    assert config.tree()["data"] == {"batch_size": 8, "context_size": 64, "folder": "piano"}


def test_a_key_declared_by_both_owners_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="is declared twice"):
        Schema({"a": Machine, "b": Machine})


def test_later_layers_win_key_by_key_and_sources_say_which() -> None:
    layers = (
        Layer("preset tiny", {"data": {"batch_size": 4, "context_size": 64}, "lr": {"learning_rate": 0.5}}),
        Layer("file my.yaml", {"data": {"batch_size": 5}, "compile": True}),
    )
    config = resolve("compile=false", layers=layers)
    assert config.values["data.batch_size"] == 5
    assert config.values["data.context_size"] == 64
    assert config.values["compile"] is False
    expected = {
        "data.batch_size": "file my.yaml",
        "data.context_size": "preset tiny",
        "lr.learning_rate": "preset tiny",
        "compile": "command line",
        "lr.min_lr": "default",
        "lr.horizon": "derived: from max_iters",
        "model.context_size": "derived: from data.context_size",
    }
    assert {name: config.sources[name] for name in expected} == expected
    assert set(config.sources) == set(config.values) == set(SCHEMA.keys)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["data.batch_size", "data.context_size", "model.n_embd"]), st.integers(2, 99)),
        max_size=4,
    )
)
def test_any_stack_of_layers_is_the_last_word_on_each_key(stack: list[dict[str, int]]) -> None:
    layers = tuple(Layer(f"file {n}.yaml", dict(tree)) for n, tree in enumerate(stack))
    config = resolve(layers=layers)
    for name in ("data.batch_size", "data.context_size", "model.n_embd"):
        setters = [n for n, tree in enumerate(stack) if name in tree]
        expected = stack[setters[-1]][name] if setters else SCHEMA.keys[name].default
        assert config.values[name] == expected
        assert config.sources[name] == (f"file {setters[-1]}.yaml" if setters else "default")


def test_the_tree_written_for_a_run_resolves_to_the_same_tree() -> None:
    tree = resolve("max_iters=3 epochs", "lr.learning_rate=8e-5", "model.widths=[3]", "threads=2").tree()
    assert SCHEMA.resolve([Layer("run piano/1", tree)]).tree() == tree


def test_defaults_are_not_shared_between_configs() -> None:
    resolve().view("recipe").model.widths.append(99)
    assert resolve().view("recipe").model.widths == [1, 2]


# References


def test_a_reference_follows_overrides() -> None:
    config = resolve("max_iters=70", "data.context_size=12")
    assert config.view("engine").lr.horizon == Budget.parse(70)
    assert config.view("recipe").model.context_size == 12


def test_an_override_of_a_referring_key_cuts_it_loose() -> None:
    config = resolve("max_iters=70", "lr.horizon=50")
    assert (config.values["lr.horizon"].steps, config.sources["lr.horizon"]) == (50, "command line")


def test_references_in_chains_text_and_lists() -> None:
    config = resolve("model.n_embd=${model.context_size}", "data.folder=sets/${data.context_size}-${max_iters}")
    assert config.values["model.n_embd"] == 256
    assert config.values["data.folder"] == "sets/256-2000"
    assert config.sources["model.n_embd"] == "command line: from model.context_size"
    assert config.sources["data.folder"] == "command line: from data.context_size, max_iters"
    widths = Layer("file a.yaml", {"model": {"widths": ["${model.n_embd}", 3], "weights": {"a": "${model.dropout}"}}})
    assert resolve(layers=(widths,)).values["model.widths"] == [128, 3]
    assert resolve(layers=(widths,)).values["model.weights"] == {"a": 0.0}


def test_a_referred_value_is_checked_in_its_new_place() -> None:
    assert mistakes("model.dropout=${data.batch_size}") == [
        "model.dropout=${data.batch_size} is too large; the limit is 0.9"
    ]
    assert "is not a number" in mistakes("model.noise=${data.folder}")[0]


@pytest.mark.parametrize(
    ("words", "cycle"),
    [
        (["model.n_embd=${model.n_embd}"], "model.n_embd -> model.n_embd"),
        (
            ["model.n_embd=${data.batch_size}", "data.batch_size=${model.n_embd}"],
            "data.batch_size -> model.n_embd -> data.batch_size",
        ),
    ],
)
def test_a_circle_of_references(words: list[str], cycle: str) -> None:
    assert any(f"refers to itself through {cycle}" in line for line in mistakes(*words))


@pytest.mark.parametrize("target", ["data.context_siz", "data", "nothing.at.all"])
def test_a_reference_to_nothing(target: str) -> None:
    (line,) = mistakes(f"model.n_embd=${{{target}}}")
    assert f"refers to {target}, which is not a key" in line
    assert ("did you mean data.context_size?" in line) == (target == "data.context_siz")


def test_what_looks_like_a_reference_and_is_none_is_refused() -> None:
    assert mistakes("data.folder=${oc.env:HOME}") == [
        "data.folder=${oc.env:HOME} has a ${ that is not a reference to a key; write ${a.b}"
    ]


# Mistakes


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("lr.learning_rat=1", "lr.learning_rate"),
        ("learning_rate=1", "lr.learning_rate"),
        ("model.context_sise=1", "model.context_size"),
        ("model.batch_size=1", "data.batch_size"),
        ("lr.learning_rate.x=1", None),
        ("zzzz=1", None),
    ],
)
def test_an_unknown_key_names_the_nearest(word: str, near: str | None) -> None:
    (line,) = mistakes(word)
    name = word.partition("=")[0]
    hint = f"; did you mean {near}?" if near else ""
    expected = (
        "is not a number"
        if name == "lr.learning_rate.x"
        else f"{name} is not a key{hint} (rung config piano lists all keys)"
    )
    assert expected in line


def test_an_unknown_key_of_a_file_names_the_file() -> None:
    with raises_code("no-key") as error:
        SCHEMA.resolve([Layer("file my.yaml", {"lr": {"foo": 1}})])
    assert "lr.foo" in str(error.value)
    assert "file my.yaml" in str(error.value)
    with raises_code("no-key") as error:
        SCHEMA.resolve([Layer("file my.yaml", {"modell": {"widths": [1]}})])
    assert "did you mean model:?" in str(error.value)
    with raises_code("no-key") as error:
        SCHEMA.resolve([Layer("command line", {"modell": {"widths": [1]}})])
    assert "did you mean model.widths?" in str(error.value)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("data.batch_size=2.5", "is not a whole number"),
        ("data.batch_size=true", "is not a whole number"),
        ("data.batch_size=eight", "is not a whole number"),
        ("data.batch_size=null", "is not a whole number"),
        ("data.batch_size=[1]", "is not a whole number"),
        ("data.batch_size=0", "is too small; the limit is 1"),
        ("threads=0", "is too small; the limit is 1"),
        ("model.dropout=0.91", "is too large; the limit is 0.9"),
        ("model.dropout=.nan", "is not a finite number"),
        ("model.noise=.nan", "is not a finite number"),
        ("lr.learning_rate=.inf", "is not a finite number"),
        ("lr.learning_rate=fast", "is not a number"),
        ("compile=1", "is not true or false"),
        ("compile=maybe", "is not true or false"),
        ("data.folder=true", "is not text"),
        ("data.folder=", "is not text"),
        ("lr.schedule=cosin", "is not one of cosine, linear; did you mean cosine?"),
        ("lr.schedule=1", "is not one of cosine, linear"),
        ("model.widths=3", "is not a list; write [a, b]"),
        ("model.widths=[1, x]", "is not a whole number"),
        ("model.widths=[0]", "is too small; the limit is 1"),
        ("model.weights=3", "is not a mapping; write {name: value}"),
        ("model.weights={a: x}", "is not a number"),
        ("max_iters=soon", "'soon' is not a quantity"),
        ("lr=3", "lr is a group of keys, not a value; set one of its keys, such as lr.learning_rate"),
    ],
)
def test_a_wrong_value_is_refused_with_the_reason(word: str, why: str) -> None:
    (line,) = mistakes(word)
    assert why in line
    assert line.startswith(word.partition("=")[0])


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("data.batch_size=3e5", 300_000),
        ("lr.learning_rate=8e-5", 8e-5),
        ("lr.learning_rate=1", 1.0),
        ("threads=null", None),
        ("threads=3", 3),
        ("data.folder=2024", "2024"),
        ("data.folder=a=b", "a=b"),
        ("compile=true", True),
        ("model.widths=[4, 5e1]", [4, 50]),
        ("model.weights={a: 1}", {"a": 1.0}),
        ("model.weights.a=1", {"a": 1.0}),
    ],
)
def test_a_right_value_has_the_declared_type(word: str, value: Any) -> None:
    found = resolve(word).values[word.partition("=")[0].removesuffix(".a")]
    assert found == value
    assert type(found) is type(value)


def test_all_mistakes_are_told_at_once() -> None:
    lines = mistakes("lr.learning_rat=1", "data.batch_size=0", "lr.schedule=x", "model.n_embd=${nope}", "compile=3")
    assert len(lines) == 5
    for name in ("lr.learning_rat ", "data.batch_size", "lr.schedule", "model.n_embd", "compile"):
        assert sum(line.startswith(name) for line in lines) == 1


def test_rules_across_keys_of_sections_and_of_both_owners() -> None:
    assert mistakes("lr.min_lr=1", "model.context_size=3") == [
        "lr.min_lr=1 is above lr.learning_rate=0.001",
        "model.context_size and data.context_size differ",
    ]


# Files and words


def test_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    lines = ["lr: {learning_rate: 8e-5, min_lr: 1E-6}", "max_iters: 1.5M tokens", "data.batch_size: 3e5"]
    file.write_text("\n".join([*lines, "model:", "  n_embd: ${data.batch_size}"]))
    values = SCHEMA.resolve([Layer("file my.yaml", load_file(file))]).values
    assert values["lr.learning_rate"] == 8e-5
    assert values["lr.min_lr"] == 1e-6
    assert values["max_iters"].targets == 1_500_000
    assert values["model.n_embd"] == 300_000


@pytest.mark.parametrize(
    "content", ["a: [1\n", "- a\n- b\n", "a: ${b\n", "a: 1\na: 2\n"], ids=["open", "a list", "reference", "twice"]
)
def test_a_file_that_is_no_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.yaml").write_text(content)
    with raises_code("bad-file") as caught:
        load_file(tmp_path / "x.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with raises_code("no-file"):
        load_file(tmp_path / "none.yaml")
    with raises_code("cannot-read"):
        load_file(tmp_path)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("# nothing yet\n")
    assert load_file(tmp_path / "x.yaml") == {}


@pytest.mark.parametrize(
    "words",
    [
        ["lr.min_lr=1", "lr.min_lr=1"],
        ["lr.min_lr=1", "lr={min_lr: 2}"],
        ["lr={min_lr: 2}", "lr.min_lr=1"],
        ["lr=1", "lr.min_lr=2"],
    ],
)
def test_an_override_given_twice_is_refused(words: list[str]) -> None:
    with raises_code("options-conflict"):
        parse_overrides(words)


def test_overrides_of_one_section_join() -> None:
    assert parse_overrides(["lr.a=1", "lr={b: 2}", "lra=3"]) == {"lr": {"a": 1, "b": 2}, "lra": 3}


@pytest.mark.parametrize("word", ["lr.min_lr", "=3", "--lr=3", "a b=3", "a[0]=1", "x=[1,", "x=${a"])
def test_a_word_that_is_no_override(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([word])
    assert repr(word) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_differences_of_two_trees() -> None:
    before, after = resolve().tree(), resolve("lr.min_lr=1e-4", "max_iters=5").tree()
    assert differences(before, after) == {
        "max_iters": ("2000", "5"),
        "lr.min_lr": (0.0, 1e-4),
        "lr.horizon": ("2000", "5"),
    }
    assert differences({"a": 1}, {"b": 2}) == {"a": (1, None), "b": (None, 2)}
    assert differences(before, before) == {}


# Who reads what


def test_only_fetching_a_leaf_from_a_view_counts_as_reading() -> None:
    config = resolve("lr.min_lr=1e-4", "model.n_embd=64")
    engine, recipe = config.view("engine"), config.view("recipe")
    _ = (config.tree(), repr(engine), str(engine.lr), f"{recipe.model}", config.values, config.sources, engine.data)
    assert config.reads == set()
    assert config.unread() == ["lr.min_lr", "model.n_embd"]
    assert engine.lr.min_lr == 1e-4
    assert config.reads == {"lr.min_lr"}
    assert config.unread() == ["model.n_embd"]


def test_two_views_of_one_config_note_into_one_place_and_two_configs_do_not() -> None:
    one, other = resolve("model.n_embd=64"), resolve("model.n_embd=64")
    one.view("recipe")
    assert one.view("recipe").model.n_embd == 64
    assert one.unread() == []
    assert other.unread() == ["model.n_embd"]


def test_unread_lists_only_what_somebody_set() -> None:
    """A default that refers to another key has a source of its own, but nobody set it."""
    config = resolve(
        layers=(Layer("preset tiny", {"max_iters": 5}), Layer("file a.yaml", {"data": {"folder": "${max_iters}"}}))
    )
    assert config.unread() == ["max_iters", "data.folder"]


def test_rules_do_not_count_as_reading() -> None:
    assert resolve("lr.min_lr=1e-4").reads == set()


@pytest.mark.parametrize("name", ["compile", "lr", "compil"])
def test_a_view_cannot_be_written(name: str) -> None:
    config = resolve()
    view = config.view("engine")
    with pytest.raises(AttributeError):
        setattr(view, name, 3)
    with pytest.raises(AttributeError):
        view.lr.min_lr = 3.0
    with pytest.raises(AttributeError):
        del view.lr
    assert config.tree() == resolve().tree()


def test_a_key_without_a_documented_line_is_our_mistake() -> None:
    @dataclass
    class Bare:
        x: int = 3

    with pytest.raises(AssertionError, match="x has no documented line"):
        Schema({"a": Bare})


@dataclass
class Renamed:
    rate: float = key(1.0, "A rate; also read as speed.", low=0, alias="speed")


@dataclass
class RenamedOwner:
    lr: Renamed = section(Renamed, "Rates.")


def test_another_name_of_a_key_is_read_as_the_key_and_reported() -> None:
    schema = Schema({"engine": RenamedOwner})
    config = schema.resolve([Layer("file a.yaml", {"lr": {"speed": 2}})])
    assert (config.values, config.sources) == ({"lr.rate": 2.0}, {"lr.rate": "file a.yaml"})
    assert config.aliased == {"lr.rate": "lr.speed"}
    later = schema.resolve([Layer("file a.yaml", {"lr": {"speed": 2}}), Layer("command line", {"lr": {"rate": 3}})])
    assert (later.values, later.aliased) == ({"lr.rate": 3.0}, {})
    with raises_code("bad-value"):
        schema.resolve([Layer("file a.yaml", {"lr": {"speed": -1}})])


def test_a_key_under_both_its_names_is_refused() -> None:
    with raises_code("options-conflict"):
        Schema({"engine": RenamedOwner}).resolve([Layer("command line", {"lr": {"speed": 2, "rate": 2}})])
