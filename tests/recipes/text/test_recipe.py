"""If this fails, a run on text uses other components, steps or windows than was asked for, or a mistake of a user is
answered with a traceback."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rung.data.store import Store
from rung.doctor.preflight.inputs import sound_inputs
from rung.doctor.preflight.result import CheckContext
from rung.errors import ConfigError
from rung.random import Draw
from rung.recipe import Recipe
from rung.recipes import presets
from rung.recipes.text import config as keys
from rung.recipes.text.components import check_names, choose
from rung.recipes.text.recipe import Text
from rung.runs.query import open_run
from tests.contract.cases import Case, text
from tests.errors import raises_code
from tests.recipes.text.stores import Document, write_store

ARXIV = "cs.CV cs.AI cs.SY cs.CE cs.PL cs.IT cs.DS cs.NE math.AC math.GR math.ST".split()  # noqa: SIM905
SHORT = "model.n_layer=1 model.n_embd=16 model.n_head=2 model.rotary_fraction=0.5 data.context_size=20".split()  # noqa: SIM905


@pytest.fixture
def case(text_data: Path) -> Case:
    return text(text_data)


def recipe_of(case: Case, *words: str) -> Recipe:
    config = case.config(*words)
    return Text(config.view("recipe"), config.view("engine").seed)


def batch_of(stream: Any, rows: np.ndarray) -> tuple[dict[str, torch.Tensor], Draw]:
    draw = Draw(0, -1, rows)
    return {name: torch.from_numpy(array) for name, array in stream.gather(rows, draw).items()}, draw


def test_muon_reads_its_momentum(case: Case) -> None:
    words = ("optimizer.momentum=0.9", "optimizer.name=muon")
    assert "optimizer.momentum" not in case.setup(*words).config.unread()


# Components


@pytest.mark.parametrize(("seed", "first"), [(0, "math.AC"), (1, "cs.PL"), (2, "cs.SY"), (3, "cs.CE")])
def test_components_of_the_published_study(seed: int, first: str) -> None:
    assert choose(ARXIV, 1, seed) == [first]


@pytest.mark.parametrize("seed", range(5))
def test_fewer_components_are_among_more(seed: int) -> None:
    chosen = [set(choose(ARXIV, k, seed)) for k in range(1, 12)]
    assert all(len(some) == k for k, some in enumerate(chosen, 1))
    assert all(few < more for few, more in itertools.pairwise(chosen))
    assert choose(list(reversed(ARXIV)), 5, seed) == choose(ARXIV, 5, seed)
    assert choose(ARXIV, 0, seed) == sorted(ARXIV)


def test_components_can_be_named(case: Case) -> None:
    setup = case.setup("dataset.components=[bread, birds]")
    assert setup.streams["train"].groups == ("birds", "bread")
    assert setup.streams["validation"].groups == ("birds", "bread")


def test_a_name_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with raises_code("no-category") as caught:
        check_names(["cs.CX"], ARXIV)
    assert "did you mean cs.C" in str(caught.value)
    with raises_code("too-few"):
        choose(ARXIV, 12, 0)


def test_keys_that_contradict_each_other(case: Case) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.components"):
        case.config("dataset.components=[birds]", "dataset.num_components=2")
    with pytest.raises(ConfigError, match="birds"):
        case.config("dataset.components=[birds, birds]")
    with pytest.raises(ConfigError, match=r"rotary_fraction=0\.5"):
        case.config("model.architecture=gpt2")
    with pytest.raises(ConfigError, match="n_head=3"):
        case.config("model.n_head=3")
    with pytest.raises(ConfigError, match=r"data\.context_size"):
        case.config("model.context_size=12")


# Steps and rows


@pytest.mark.parametrize("windows", ["within_documents", "packed"])
def test_a_budget_of_tokens_gives_the_same_steps_for_every_k(case: Case, windows: str) -> None:
    budget, batch, accumulation, context = 100_000, 6, 4, 20
    words = [
        f"optimizer.max_iters={budget} tokens", f"data.batch_size={batch}", f"data.windows={windows}",
        f"optimizer.gradient_accumulation_steps={accumulation}", f"data.context_size={context}",
    ]  # fmt: skip
    for k in (1, 2, 3):
        setup = case.setup(*words, f"dataset.num_components={k}")
        assert setup.num_steps == budget // (batch * accumulation * context)
        counts = [micro.batch["tokens"].shape for micro in setup.prefetcher().take(0)]
        assert counts == [(batch, context + 1)] * accumulation


def test_unique_tokens_are_the_same_for_every_k(case: Case) -> None:
    for k in (1, 2, 3):
        train = case.setup("dataset.max_unique_tokens=600", f"dataset.num_components={k}").streams["train"]
        assert train.about["tokens"] == 600


def test_evals_see_the_same_windows_whatever_is_trained(case: Case) -> None:
    base = case.setup("data.eval_windows=20").streams["validation"]
    for words in (
        ("seed=5", "dataset.component_seed=1"), ("data.sampling=token_uniform",), ("data.windows=packed",),
        ("dataset.max_unique_tokens=600",), ("data.batch_size=3", "model.architecture=llama"),
    ):  # fmt: skip
        assert case.setup("data.eval_windows=20", *words).streams["validation"].fingerprint == base.fingerprint
    few = case.setup("data.eval_windows=20", "dataset.num_components=2").streams["validation"]
    rows = np.arange(base.num_rows)
    wanted = [base.places(rows)[row] for row in rows if base.groups[base.group_of(rows)[row]] in few.groups]
    assert few.places(np.arange(few.num_rows)) == wanted


def test_the_order_of_training_follows_the_seed_alone(case: Case) -> None:
    one, two = case.setup("seed=1"), case.setup("seed=2")
    a, b, again = (
        s.prefetcher().take(0)[0].batch["tokens"] for s in (one, two, case.setup("seed=1", "model.n_layer=1"))
    )
    assert torch.equal(a, again)
    assert not torch.equal(a, b)


def test_held_out_splits(case: Case) -> None:
    recipe = recipe_of(case)
    test = recipe.streams("test")["test"]
    assert all(place["document"].startswith("test_") for place in test.places(np.arange(test.num_rows)))
    with raises_code("no-split") as caught:
        recipe.streams("dev")
    assert "train, validation, test" in str(caught.value)


def test_data_without_a_validation_split_can_be_trained_on(case: Case, tmp_path: Path) -> None:
    out = write_store(tmp_path / "bare", [Document("train", "x", np.arange(200) % 50)])
    setup = case.setup(f"dataset.base_dataset_name={out}")
    assert list(setup.streams) == ["train"]
    assert len(setup.samples(Draw(0, 0, np.arange(1)))) == 2


# Loss


def test_the_loss_is_the_sum_of_its_targets_and_of_its_components(case: Case) -> None:
    setup = case.setup("data.eval_windows=0", *case.calm)
    stream = setup.streams["validation"]
    batch, draw = batch_of(stream, np.arange(stream.num_rows))
    loss = setup.state.objectives[0].loss(batch, draw)
    assert loss.targets is not None
    losses, weights = loss.targets[:2]
    assert losses.shape == weights.shape == (stream.num_rows, 48)
    assert losses.sum().item() == pytest.approx(loss.sum.item(), rel=1e-6)
    assert weights.sum() == loss.count
    assert (weights == 0).sum() > 0
    assert list(loss.parts) == ["component/birds", "component/boats", "component/bread"]
    for number, (total, count) in enumerate(loss.parts.values()):
        is_in = batch["component"] == number
        assert total.item() == pytest.approx(losses[is_in].sum().item(), rel=1e-5)
        assert count == weights[is_in].sum()


def test_parts_have_the_same_names_when_a_component_is_not_in_the_batch(case: Case) -> None:
    setup = case.setup()
    stream = setup.streams["validation"]
    rows = np.arange(stream.num_rows)
    batch, draw = batch_of(stream, rows[stream.group_of(rows) == 1])
    parts = setup.state.objectives[0].loss(batch, draw).parts
    assert list(parts) == ["component/birds", "component/boats", "component/bread"]
    assert parts["component/birds"][1] == 0


def test_a_component_alone_is_the_whole_loss_and_nothing_to_warn_of(case: Case) -> None:
    setup = case.setup("dataset.num_components=1", *case.calm)
    stream = setup.streams["validation"]
    batch, draw = batch_of(stream, np.arange(stream.num_rows))
    loss = setup.state.objectives[0].loss(batch, draw)
    assert list(loss.parts.values()) == [(loss.sum, loss.count)]
    assert list(loss.parts) == [f"component/{stream.groups[0]}"]
    assert [given.tensors for given in setup.recipe.inputs()] == [list(batch)]
    assert [result.level for result in sound_inputs(CheckContext(setup))] == ["pass"]


def test_any_name_of_a_category_can_be_trained_on(case: Case, tmp_path: Path) -> None:
    names = ["sum", "count", "<b>x</b>", "a\nb", "a b", "\x1b[31mred", "né"]
    documents = [
        Document(split, name, np.arange(60) % 50) for name in names for split in ("train", "validation", "test")
    ]
    out = write_store(tmp_path / "odd", documents)
    setup = case.setup(f"dataset.base_dataset_name={out}", "optimizer.max_iters=3")
    values = setup.evaluator.run(setup.state.model)["validation"]
    parts = [name for name in values if name.startswith("component/")]
    assert len(parts) == len(names)
    assert all(name.isprintable() for name in parts)
    assert setup.streams["train"].groups == tuple(sorted(names))


def test_many_categories_have_no_parts(case: Case, tmp_path: Path) -> None:
    documents = [Document(split, f"c{n}", np.arange(60)) for n in range(70) for split in ("train", "validation")]
    setup = case.setup(f"dataset.base_dataset_name={write_store(tmp_path / 'many', documents)}")
    assert setup.evaluator.run(setup.state.model)["validation"].keys() == {"loss", "loss_se", "targets"}


def test_wide_vocabularies_travel_as_uint32(case: Case, tmp_path: Path) -> None:
    documents = [Document(split, "x", 70_000 - np.arange(90)) for split in ("train", "validation")]
    setup = case.setup(f"dataset.base_dataset_name={write_store(tmp_path / 'wide', documents, vocab_size=70_001)}")
    assert setup.prefetcher().take(0)[0].batch["tokens"].dtype == torch.uint32
    loss = setup.evaluator.run(setup.state.model)["validation"]["loss"]
    assert loss == pytest.approx(np.log(70_001), rel=0.01)


# Preparation and mistakes


def test_what_is_only_held_out_is_not_chosen(case: Case, tmp_path: Path) -> None:
    places = [("train", "a"), ("train", "b"), ("validation", "a"), ("validation", "c"), ("test", "c")]
    out = write_store(tmp_path / "published", [Document(split, name, np.arange(90)) for split, name in places])
    words = f"dataset.base_dataset_name={out}"
    assert recipe_of(case, words).streams()["train"].groups == ("a", "b")
    with raises_code("too-few"):
        recipe_of(case, words, "dataset.num_components=3").streams()
    with raises_code("too-few") as caught:
        recipe_of(case, words, "dataset.components=[c]").streams()
    assert "'c'" in str(caught.value)
    with raises_code("too-few"):
        recipe_of(case, words, "dataset.components=[b]", "data.eval_windows=0").streams()


def test_a_setting_of_preparation_that_would_do_nothing_is_refused(case: Case, tmp_path: Path) -> None:
    documents = [Document(split, "x", np.arange(90)) for split in ("train", "validation")]
    out = write_store(tmp_path / "set", documents, settings={"tokenizer": "bytes", "min_tokens": 9, "config": "x"})
    words = f"dataset.base_dataset_name={out}"
    recipe_of(case, words).streams()
    recipe_of(case, words, "dataset.tokenizer=bytes").streams()
    usual = ("dataset.tokenizer=bpe", "dataset.min_tokens=2", "dataset.hub_config=no_ref")  # as good as any when set
    for wrong in (*usual, "dataset.tokenizer=characters"):
        with raises_code("data-mismatch") as caught:
            recipe_of(case, words, wrong).streams()
        assert "--replace" in str(caught.value)


def test_another_kind_of_data_or_none_is_refused(case: Case, piano_data: Path) -> None:
    with raises_code("data-mismatch"):
        recipe_of(case, f"dataset.base_dataset_name={piano_data}").streams()
    with raises_code("no-data") as caught:
        recipe_of(case, "dataset.base_dataset_name=nothing_here").streams()
    assert "`rung data text --from FOLDER --name nothing_here`" in str(caught.value)


# Samples


def test_samples_are_text_and_stay_text(case: Case) -> None:
    setup = case.setup("sampling.num_samples=4", "sampling.num_tokens=60")
    made = setup.samples(Draw(0, 0, np.arange(1)))
    assert [sample.name for sample in made] == [f"sample-{n}.txt" for n in range(4)]
    assert ["birds" in made[0].caption, "boats" in made[1].caption, "birds" in made[3].caption] == [True] * 3
    for sample in made:
        text_of = sample.data.decode("utf-8")
        assert text_of.startswith(f"[{sample.caption}]")
        assert all(c in "\n\t" or c.isprintable() or c == "\ufffd" for c in text_of), ascii(text_of)
    assert made == setup.samples(Draw(0, 0, np.arange(1)))


def test_a_given_prompt_is_continued(case: Case) -> None:
    setup = case.setup(r'sampling.prompt="<b>the \e[31mwren</b>"', "sampling.temperature=0")
    (one, two) = setup.samples(Draw(0, 0, np.arange(1)))
    assert "<b>the ␛[31mwren</b>" in one.data.decode()
    assert one.data == two.data


def test_padding_of_the_table_is_never_drawn(case: Case) -> None:
    setup = case.setup("model.vocab_multiple=512", "sampling.num_tokens=80", "sampling.top_p=1")
    model = setup.state.model
    assert model.shape.vocab_size == 512  # type: ignore[union-attr]
    with torch.no_grad():
        model.head.weight[300:] = 50 * torch.sign(torch.randn(212, 1))  # type: ignore[union-attr]
    for sample in setup.samples(Draw(0, 0, np.arange(1))):
        assert "80 tokens" in sample.caption or "end of the document" in sample.caption


def test_a_prompt_that_cannot_be_encoded_is_found_before_training(case: Case, tmp_path: Path) -> None:
    documents = [Document(split, "x", np.arange(90) % 3) for split in ("train", "validation")]
    out = write_store(tmp_path / "abc", documents, characters="abc")
    with raises_code("unknown-character"):
        case.setup(f"dataset.base_dataset_name={out}", "sampling.prompt=xyz")


# As a user


def test_training_and_its_mistakes_from_the_command_line(
    text_data: Path, tmp_path: Path, rung: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    words = [f"dataset.base_dataset_name={text_data}", "system.device=cpu", *SHORT, "optimizer.max_iters=6"]
    words += ["lr.warmup_iters=2", "sampling.num_tokens=10", "data.eval_windows=8"]
    rung("train", "text", *words, "dataset.num_components=2")
    shown = json.loads(rung("show", "text/1", "--json").stdout)
    assert (shown["id"], shown["status"]) == ("text/1", "finished")
    done = rung("train", "text", *words, "dataset.components=[bird]", check=False)
    assert (done.returncode, "did you mean birds?" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert "text/2" not in rung("ls").stdout
    rung("eval", "text/1", "--split", "test")
    kept = tmp_path / "runs/text/1/evals/test-6.json"
    first = kept.read_bytes()
    look = ["eval", "text/1", "--split", "test", "data.eval_windows=0"]
    assert "is of other rows than these keys give" in rung(*look, check=False).stderr
    rung(*look, "--out", "whole")
    assert kept.read_bytes() == first, "a report takes what is there for the run's own figures"


def test_a_run_recorded_with_keys_that_are_gone_opens_resumes_and_replays(
    text_data: Path, tmp_path: Path, rung: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    words = [f"dataset.base_dataset_name={text_data}", "system.device=cpu", *SHORT, "optimizer.max_iters=4"]
    words += ["lr.warmup_iters=2", "data.eval_windows=8", "checkpoint.every=2", "checkpoint.keep=0"]
    rung("train", "text", *words, "signals.activation_stats_every=3")
    path = tmp_path / "runs/text/1"
    config, sources = path / "config.yaml", path / "config.sources.json"
    text = config.read_text().replace("activation_stats_every: 3", "look_every: 3")
    config.write_text(f"stage: next_token_pretraining\nloss_masking: pretraining\n{text}")
    gone = {"stage": "preset tiny", "loss_masking": "default", "signals.look_every": "command line"}
    told = json.loads(sources.read_text())
    del told["signals.activation_stats_every"]
    sources.write_text(json.dumps(gone | told))

    run = open_run("text/1", tmp_path / "runs")
    assert run.config()["signals"]["activation_stats_every"] == 3
    assert not {"stage", "loss_masking", "signals.look_every"} & {*run.config(), *run.sources()}
    assert run.sources()["signals.activation_stats_every"] == "command line"
    losses = run.series("loss").values.tolist()
    rung("resume", "text/1", "--at", 2)
    assert open_run("text/1", tmp_path / "runs").series("loss").values.tolist() == losses
    rung("replay", "text/1@3")
    rung("train", "--parent", "text/1")
    refused = rung("train", "text", *words, "loss_masking=pretraining", check=False)
    assert refused.returncode == 2  # of an old run it is known, from a user it is no key


def test_presets_resolve_and_are_in_the_readme() -> None:
    from rung.resolve import resolve

    readme = (Path(keys.__file__).parent / "README.md").read_text("utf-8")
    assert len(presets(Text)) == 6
    for name in presets(Text):
        resolve("text", [f"preset={name}"])
        assert f"| `{name}` |" in readme


def test_the_store_of_the_tests_is_a_text_store(text_data: Path) -> None:
    """Or all tests here are of something that no user has."""
    store = Store.open(text_data, "text")
    assert {"source", "tokenizer", "vocab_size", "categories"} <= set(store.info)
    assert {"split", "start", "length", "id", "category", "source", "digest"} <= set(store.index[0])
