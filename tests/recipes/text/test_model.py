"""If this fails, the text model is not the model whose name it has, or somebody else's model is measured wrongly."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rung.data.store import Store
from rung.data.tokenizer import learn
from rung.nn import hf
from rung.nn.transformer import Transformer
from rung.random import Draw
from rung.recipes.text.config import Model
from rung.recipes.text.model import part_names
from rung.recipes.text.recipe import Text
from rung.resolve import resolve
from tests.contract.cases import Case, text
from tests.errors import raises_code
from tests.recipes.text.stores import Document, write_store

transformers = pytest.importorskip("transformers")
PYTHIA_VOCAB = 50_277


def model_keys(preset: str) -> Model:
    config = resolve("text", [f"preset={preset}"]).config
    keys: Model = config.view("recipe").model
    return keys


@pytest.mark.parametrize(("preset", "vocab_size"), [("pythia-14m", 50_254), ("pythia-70m", PYTHIA_VOCAB)])
def test_the_table_has_the_size_of_pythias(preset: str, vocab_size: int) -> None:
    assert model_keys(preset).shape(vocab_size).vocab_size == 50_304


def test_pythia_14m_has_its_published_number_of_parameters() -> None:
    model = Transformer(model_keys("pythia-14m").shape(PYTHIA_VOCAB), seed=0)
    assert sum(p.numel() for p in model.parameters()) == 14_067_712


@pytest.mark.parametrize("preset", ["pythia-14m", "pythia-70m", "gpt2", "tiny"])
def test_the_first_loss_is_that_of_a_guess(preset: str) -> None:
    vocab_size = 5_000
    model = Transformer(model_keys(preset).shape(vocab_size), seed=0).eval()
    ids = torch.randint(vocab_size, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(model.shape.vocab_size), rel=0.01)


@pytest.mark.parametrize(
    ("preset", "words", "kind"),
    [
        ("pythia-14m", [], "GPTNeoXForCausalLM"),
        ("pythia-70m", [], "GPTNeoXForCausalLM"),
        ("gpt2", ["model.n_layer=2"], "GPT2LMHeadModel"),
        ("tiny", ["model.architecture=llama"], "LlamaForCausalLM"),
    ],
)
def test_logits_are_those_of_transformers(preset: str, words: list[str], kind: str, tmp_path: Path) -> None:
    keys = resolve("text", [f"preset={preset}", *words]).config.view("recipe").model
    model = Transformer(keys.shape(3_000), seed=1).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # zeros and ones would hide an exchange of two weights
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    hf.save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(theirs).__name__ == kind
    ids = torch.randint(3_000, (2, min(keys.context_size, 100)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, want, back = model(ids), theirs(ids).logits, hf.load(tmp_path)(ids)
    assert (ours - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item())
    assert (back - ours).abs().max() < 2e-5 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama"])
def test_no_prediction_sees_what_comes_after_it(architecture: str) -> None:
    model = Transformer(Model(architecture=architecture, context_size=16).shape(50), seed=0).eval()  # type: ignore[arg-type]
    ids = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 50
    with torch.no_grad():
        a, b = model(ids), model(changed)
    assert torch.equal(a[0, :9], b[0, :9])
    assert not torch.equal(a[0, 9:], b[0, 9:])


def test_names_of_parts() -> None:
    assert part_names(["cs.CV", "a\nb", "a b", "sum"]) == [
        "component/cs.CV", "component/a b", "component/a b_", "component/sum_",
    ]  # fmt: skip
    assert part_names([str(n) for n in range(65)]) == []


# Models of others


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose tokenizer is a tokenizer.json, as of a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("data")
    words = ["the wren sings in the reed and the oak"] * 20
    tokenizer = learn("bpe", words, 270)
    ids = tokenizer.encode(" ".join(words)).astype(np.int64)
    documents = [Document(split, "x", ids) for split in ("train", "validation", "test")]
    return write_store(folder / "bpe", documents, tokenizer=tokenizer)


@pytest.fixture
def case(prepared: Path) -> Case:
    return text(prepared)


def recipe_of(case: Case, *words: str) -> Text:
    config = case.config(*words)
    return Text(config.view("recipe"), 0)


def save_theirs(folder: Path, kind: str, vocab_size: int, context: int = 128) -> torch.nn.Module:
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": context}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(("kind", "made"), [("gpt_neox", "Transformer"), ("llama", "Transformer"), ("phi", "Causal")])
def test_a_model_of_others_is_measured_by_the_same_loss(case: Case, kind: str, made: str, tmp_path: Path) -> None:
    recipe = recipe_of(case, "data.context_size=32")
    theirs = save_theirs(tmp_path, kind, recipe.vocab_size + 34)
    shutil.copy(recipe.store.path / "tokenizer.json", tmp_path)
    ours = recipe.load_external(tmp_path)
    assert type(ours).__name__ == made
    stream = recipe.streams("test")["test"]
    rows = np.arange(4)
    arrays = stream.gather(rows, Draw(0, -1, rows))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.no_grad():
        losses, weights = recipe.objectives(ours)[0].loss(batch, Draw(0, -1, rows)).targets[:2]
        tokens = batch["tokens"].long()
        logits = theirs(tokens[:, :-1].clamp(max=recipe.vocab_size - 1)).logits
        targets = tokens[:, 1:]
        wanted = -logits.log_softmax(-1).gather(-1, targets.clamp(max=recipe.vocab_size - 1)[..., None])[..., 0]
    assert torch.allclose(losses, wanted * weights, atol=2e-5)


def test_models_that_cannot_read_the_data_are_refused(case: Case, tmp_path: Path) -> None:
    recipe = recipe_of(case, "data.context_size=32")
    size = recipe.vocab_size
    with raises_code("no-checkpoint"):
        recipe.load_external(tmp_path / "none")
    save_theirs(tmp_path / "few", "gpt_neox", size - 1)
    with raises_code("tokenizer-mismatch") as caught:
        recipe.load_external(tmp_path / "few")
    assert "dataset.tokenizer=" in str(caught.value)
    save_theirs(tmp_path / "many", "gpt_neox", 5_000)
    with raises_code("tokenizer-mismatch"):
        recipe.load_external(tmp_path / "many")
    other = learn("bpe", ["rye bakes with water"] * 9, 270).files["tokenizer.json"]
    (tmp_path / "many" / "tokenizer.json").write_bytes(other)
    with raises_code("tokenizer-mismatch") as caught:
        recipe.load_external(tmp_path / "many")
    assert "dataset.tokenizer=" in str(caught.value)
    save_theirs(tmp_path / "short", "gpt_neox", size, context=31)
    with raises_code("checkpoint-mismatch") as caught:
        recipe.load_external(tmp_path / "short")
    assert "31 positions" in str(caught.value)


def test_a_folder_without_all_its_weights_is_refused(case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    recipe = recipe_of(case, "data.context_size=32")
    for kind in ("gpt_neox", "phi"):
        save_theirs(tmp_path / kind, kind, recipe.vocab_size)
        weights = load_file(tmp_path / kind / "model.safetensors")
        gone = next(name for name in weights if "layers.1" in name and name.endswith("weight"))
        del weights[gone]
        save_file(weights, tmp_path / kind / "model.safetensors", metadata={"format": "pt"})
        with raises_code("checkpoint-damaged") as caught:
            recipe.load_external(tmp_path / kind)
        assert gone.split(".", 1)[1] in str(caught.value)


def test_a_tokenizer_that_was_only_saved_otherwise_is_the_same(case: Case, tmp_path: Path) -> None:
    recipe = recipe_of(case, "data.context_size=32")
    save_theirs(tmp_path, "gpt_neox", recipe.vocab_size)
    tree = json.loads(Store.open(recipe.store.path).path.joinpath("tokenizer.json").read_text())
    tree["truncation"] = {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree, indent=2))
    theirs = recipe.load_external(tmp_path)  # not refused, and it is their model
    assert theirs(torch.zeros((1, 3), dtype=torch.long)).shape == (1, 3, recipe.vocab_size)
