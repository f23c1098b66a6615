"""If this fails, sound reaches the language model at the wrong place, or something counts that is no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rung.random import Draw
from rung.recipes.speech import config as keys
from rung.recipes.speech.windows import Windows

pytest.importorskip("transformers", reason="the speech model is made of transformers' parts")

from rung.recipes.speech.lm import add_lora, open_lm
from rung.recipes.speech.model import SpeechLoss, SpeechModel, answer

WIDTHS = (6, 4)
END = 256


def small(*, queries: int = 2, layers: int = 0, lm: Any = None) -> SpeechModel:
    torch.manual_seed(1)
    cfg = keys.Model(
        audio=keys.Audio(n_layer=layers, n_head=2, n_embd=8, stack=2),
        qformer=keys.QFormer(n_layer=2, n_head=2, n_embd=16, queries=queries),
        lm=keys.Lm(name="bytes", n_layer=2, n_head=2, n_embd=16),
    )
    lm = lm if lm is not None else open_lm(cfg.lm, 257)
    model = SpeechModel(cfg, lm, widths=WIDTHS, windows=Windows(5, 3), max_frames=64, seed=1)
    with torch.no_grad():  # away from zeros and ones, which would hide a part that is left out
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.eval()


def rows(lengths: list[int], answers: list[str], before: list[str] | None = None) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    before = before or ["hi "] * len(lengths)
    return [
        {
            "features": torch.from_numpy(rng.standard_normal((length, sum(WIDTHS))).astype(np.float16)),
            "before": list(start.encode()), "after": list(b" so "), "answer": [*text.encode(), END],
        }
        for length, text, start in zip(lengths, answers, before)
    ]  # fmt: skip


def batch_of(some: list[dict[str, Any]], *, more_frames: int = 0, more_tokens: int = 0) -> dict[str, Tensor]:
    def pad(items: list[Any], more: int = 0) -> Tensor:
        longest = max(map(len, items)) + more
        return torch.tensor([[*item, *[0] * (longest - len(item))] for item in items])

    frames = [len(row["features"]) for row in some]
    features = torch.zeros(len(some), max(frames) + more_frames, sum(WIDTHS), dtype=torch.float16)
    for number, row in enumerate(some):
        features[number, : frames[number]] = row["features"]
    count = [len(row["answer"]) for row in some]
    return {
        "features": features, "frames": torch.tensor(frames), "before": pad([row["before"] for row in some]),
        "before_length": torch.tensor([len(row["before"]) for row in some]),
        "after": pad([row["after"][:-1] for row in some]),
        "after_length": torch.tensor([len(row["after"]) - 1 for row in some]),
        "tokens": pad([[row["after"][-1], *row["answer"]] for row in some], more_tokens),
        "answer_length": torch.tensor(count), "task": torch.zeros(len(some)), "is_own": torch.ones(len(some)),
    }  # fmt: skip


def reference_loss(model: SpeechModel, row: dict[str, Any]) -> tuple[Tensor, int]:
    """One row, written down as one would explain it: nothing padded, nothing masked, windows in a loop."""
    frames = torch.cat([
        nn.functional.layer_norm(part, part.shape[-1:], norm.weight, norm.bias)  # type: ignore[union-attr]
        for part, norm in zip(row["features"].float().split(WIDTHS, dim=-1), model.norms)
    ], dim=-1)  # fmt: skip
    vectors, start = [], 0
    while True:
        window = frames[start : start + model.windows.size]
        out = model.qformer(query_embeds=model.queries_1QH, encoder_hidden_states=window[None]).last_hidden_state
        vectors.append(model.projection(out)[0])
        if start + model.windows.size >= len(frames):
            break
        start += model.windows.stride
    embed = model.lm.get_input_embeddings()
    parts = ("before", "after", "answer")
    before, after, right = (embed(torch.tensor(row[part], dtype=torch.long)) for part in parts)
    prompt = torch.cat([before, *vectors, after])
    whole = torch.cat([prompt, right])
    logits = model.lm(inputs_embeds=whole[None]).logits[0]
    predictions = logits[len(prompt) - 1 : -1]
    return cross_entropy(predictions, torch.tensor(row["answer"]), reduction="sum"), len(row["answer"])


def test_a_batch_has_the_loss_of_its_rows_one_by_one() -> None:
    model = small()
    some = rows([17, 5, 3, 11], ["one", "", "a longer answer", "x"], ["a", "bcd", "ef ", ""])
    loss = SpeechLoss(model, ["asr"])(batch_of(some), Draw(0, 0, np.arange(4)))
    sums, counts = zip(*(reference_loss(model, row) for row in some))
    assert float(loss.count) == sum(counts)
    assert loss.sum.item() == pytest.approx(sum(one.item() for one in sums), rel=1e-5)
    assert loss.targets is not None
    assert loss.targets.losses.sum(dim=1).tolist() == pytest.approx([one.item() for one in sums], rel=1e-4)


@pytest.mark.parametrize("layers", [0, 2], ids=["features", "trained layers"])
def test_padding_and_neighbours_change_nothing(layers: int) -> None:
    model = small(layers=layers)
    some = rows([17, 5, 3, 11], ["one", "two", "a longer answer", "x"])
    draw = Draw(0, 0, np.arange(4))
    loss = SpeechLoss(model, ["asr"])
    together = loss(batch_of(some), draw).targets
    padded = loss(batch_of(some, more_frames=23, more_tokens=9), draw).targets
    assert together is not None
    assert padded is not None
    for number, row in enumerate(some):
        alone = loss(batch_of([row]), draw)
        for many in (together, padded):
            assert float(many.losses[number].sum()) == pytest.approx(alone.sum.item(), rel=1e-5)


def test_gradients_do_not_see_what_a_batch_is_filled_up_with() -> None:
    model = small()
    batch = batch_of(rows([17, 5], ["one", "longer"]), more_tokens=4)
    batch["features"] = batch["features"].float().requires_grad_()
    SpeechLoss(model, ["asr"])(batch, Draw(0, 0, np.arange(2))).sum.backward()
    seen = batch["features"].grad
    assert seen is not None
    assert seen.isfinite().all()
    assert seen[1, 5:].abs().max() == 0
    assert seen[1, :5].abs().min() > 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("windows", "frames", "expected"),
    [
        (Windows(17, 17, "drop"), 1500, 88),  # SALMONN: 30 s of Whisper in windows of a third of a second
        (Windows(17, 17, "pad"), 1500, 89),
        (Windows(17, 17, "drop"), 3, 1), (Windows(5, 3, "pad"), 5, 1), (Windows(5, 3, "pad"), 6, 2),
        (Windows(5, 3, "drop"), 7, 1), (Windows(5, 3, "drop"), 8, 2), (Windows(5, 7, "pad"), 12, 2),
    ],
)  # fmt: skip
def test_windows_are_counted(windows: Windows, frames: int, expected: int) -> None:
    assert windows.count(frames) == expected
    assert int(windows.count_of(torch.tensor([frames]))[0]) == expected
    assert Windows.of(0.333333, 0.333333, 50.0, "drop") == Windows(17, 17, "drop")


def test_lora_adds_nothing_at_first_and_is_all_that_is_trained_of_a_frozen_model(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="LoRA is peft's")
    lm = frozen_lm(tmp_path)
    ids = torch.tensor([[1, 2, 3, 4]])
    before = lm(ids).logits
    add_lora(lm, keys.Lora(rank=4, dropout=0.5))
    assert torch.equal(lm.eval()(ids).logits, before)
    trained = [name for name, p in lm.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "v_proj"}


def frozen_lm(folder: Path, dtype: str = "float32", **more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, attention_dropout=0.3)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return open_lm(keys.Lm(name="folder", path=str(folder), dtype=dtype, **more), 257)


def test_a_frozen_model_has_no_dropout(tmp_path: Path) -> None:
    lm = frozen_lm(tmp_path).train()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(lm(ids).logits, lm(ids).logits)


def test_greedy_answers_are_those_of_whole_forwards(tmp_path: Path) -> None:
    """The cache of generation, and prompts of unequal length in one batch, against a forward per token."""
    model = small(lm=frozen_lm(tmp_path))
    some = rows([17, 5, 3], ["", "", ""], ["hello ", "b", ""])
    found = answer(model, batch_of(some), END, num_tokens=6)
    for row, ids in zip(some, found):
        said: list[int] = []
        for _ in range(6):
            logits = model(batch_of([{**row, "answer": [*said, 0]}]))
            said.append(int(logits[0, -1].argmax()))
        assert ids == (said[: said.index(END)] if END in said else said)


def test_beams_find_an_answer_at_least_as_likely(tmp_path: Path) -> None:
    model = small(lm=frozen_lm(tmp_path))
    batch = batch_of(rows([17], [""]))

    def likelihood(ids: list[int]) -> float:
        row = {**rows([17], [""])[0], "answer": ids}
        logits = model(batch_of([row]))
        return -cross_entropy(logits[0], torch.tensor(ids), reduction="sum").item()

    greedy, beam = (answer(model, batch, END, num_tokens=5, beams=beams)[0] for beams in (1, 4))
    assert len(greedy) == len(beam) == 5
    assert likelihood(beam) >= likelihood(greedy) - 1e-4


def test_8_bit_weights_answer_like_the_whole_ones(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="8 bits are bitsandbytes'")
    whole, small_ = frozen_lm(tmp_path), frozen_lm(tmp_path, load_in_8bit=True)
    assert {p.dtype for name, p in small_.named_parameters() if "proj" in name} == {torch.int8}
    ids = torch.tensor([[5, 80, 120, 7]])
    a, b = whole(ids).logits, small_(ids).logits.float()
    assert float((a - b).norm() / a.norm()) < 0.1
    add_lora(small_, keys.Lora(rank=2))
    small_(inputs_embeds=small_.get_input_embeddings()(ids)).logits.float().square().sum().backward()
    trained = [p for p in small_.parameters() if p.requires_grad]
    assert trained
    assert all(p.dtype == torch.float32 and p.grad is not None for p in trained)
