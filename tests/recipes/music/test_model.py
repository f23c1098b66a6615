"""If this fails, the model is not the one its name says, or sees what it must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rung.errors import CheckpointError
from rung.random import Draw
from rung.recipes.music import config as keys
from rung.recipes.music.delay import DelayPattern, Specials
from rung.recipes.music.generate import SamplingParams, generate, guide, restrict
from rung.recipes.music.model import MusicLoss, MusicModel
from rung.recipes.music.weights import config_from_dia, load_dia

SIZE, DELAYS = 16, (0, 2, 1)
SPECIALS = Specials.of(SIZE)
SMALL = keys.Model(n_layer=2, n_embd=32, text=keys.TextModel(n_layer=1, n_embd=16, n_head=2))


def small_model(cfg: keys.Model = SMALL, seed: int = 0) -> MusicModel:
    model = MusicModel(
        cfg, num_channels=3, vocab_size=SPECIALS.vocab_size, num_steps=40, text_length=12, seed=seed
    )  # fmt: skip
    with torch.no_grad():
        model.head.weight.mul_(20)  # predictions that differ
        model.codes.weight.mul_(20)
    return model.eval()


def texts(num_rows: int, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, (num_rows, 12), generator=generator), torch.tensor(lengths)


def batch_of(num_frames: int = 9, num_rows: int = 2, **options: bool) -> dict[str, torch.Tensor]:
    codes = np.random.default_rng(3).integers(0, SIZE, (num_rows, num_frames, 3)).astype(np.uint16)
    pattern = DelayPattern(DELAYS, num_frames, SPECIALS, **options)
    lengths = np.arange(num_frames - num_rows + 1, num_frames + 1)
    rows = pattern.lay_out(codes, lengths, np.ones(num_rows, bool))
    text, text_length = texts(num_rows, *range(4, 4 + num_rows))
    return {"codes": torch.from_numpy(rows), "text": text, "text_length": text_length}


def dia(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    transformers = pytest.importorskip("transformers")
    encoder = transformers.DiaEncoderConfig(
        max_position_embeddings=12, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=2,
        head_dim=24, intermediate_size=64,
    )  # fmt: skip
    decoder = transformers.DiaDecoderConfig(
        max_position_embeddings=40, num_hidden_layers=3, hidden_size=48, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, cross_num_attention_heads=4, cross_head_dim=16, cross_num_key_value_heads=4,
        cross_hidden_size=32, vocab_size=20, num_channels=3, eos_token_id=16, pad_token_id=17, bos_token_id=18,
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.DiaConfig(encoder_config=encoder, decoder_config=decoder, delay_pattern=list(DELAYS))
    model = transformers.DiaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path / "dia")
    return model, tmp_path / "dia"


def from_dia(folder: Path) -> MusicModel:
    known = config_from_dia(folder)
    sizes = dict(known["model"])
    cfg = keys.Model(text=keys.TextModel(**sizes.pop("text")), **sizes)
    model = MusicModel(
        cfg, num_channels=known["data"]["codebooks"], vocab_size=20, num_steps=40,
        text_length=known["data"]["text_length"], seed=None,
    )  # fmt: skip
    load_dia(model, folder)
    return model.eval()


def test_dia_of_transformers_gives_the_same_logits(tmp_path: Path) -> None:
    theirs, folder = dia(tmp_path)
    ours = from_dia(folder)
    text, length = texts(2, 12, 7)
    ids = torch.randint(0, 20, (2, 15, 3), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(12) < length[:, None]).long()
    with torch.no_grad():
        expected = theirs(input_ids=text, attention_mask=mask, decoder_input_ids=ids).logits
        found = ours(ids, text, length)
    expected = expected.view(2, 3, 15, 20).transpose(1, 2)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_weights_of_a_dia_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, folder = dia(tmp_path)
    known = config_from_dia(folder)
    sizes = dict(known["model"]) | {"n_hidden": 64}
    cfg = keys.Model(text=keys.TextModel(**sizes.pop("text")), **sizes)
    model = MusicModel(cfg, num_channels=3, vocab_size=20, num_steps=40, text_length=12, seed=None)
    with pytest.raises(CheckpointError) as caught:
        load_dia(model, folder)
    assert caught.value.code == "checkpoint-mismatch"


def test_the_dia_preset_is_dia(tmp_path: Path) -> None:
    """1.61 billion parameters in 9 channels, as transformers counts them."""
    from rung.recipes import find_recipe
    from rung.resolve import resolve

    transformers = pytest.importorskip("transformers")
    assert find_recipe("music")
    cfg = resolve("music", ["preset=dia"]).config.view("recipe")
    with torch.device("meta"):
        ours = MusicModel(
            cfg.model, num_channels=9, vocab_size=1028, num_steps=3072, text_length=cfg.data.text_length, seed=None
        )
        theirs = transformers.DiaForConditionalGeneration(transformers.DiaConfig())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) == 1_611_160_576


def test_no_prediction_sees_what_comes_after_it_in_any_codebook() -> None:
    """logits for code (t, c) may depend on channel c' only up to frame t + D[c] - D[c'] - 1."""
    model, batch = small_model(), batch_of(has_end=False)
    ids = batch["codes"].long()[:, :-1]
    with torch.no_grad():
        before = model(ids, batch["text"], batch["text_length"])
        for step in range(1, ids.shape[1]):
            for channel in range(3):
                changed = ids.clone()
                changed[:, step, channel] = (changed[:, step, channel] + 1) % SIZE
                moved = (model(changed, batch["text"], batch["text_length"]) - before).abs().amax(dim=(0, 2, 3))
                assert moved[:step].max() == 0
                assert moved[step:].max() > 0


def test_a_row_without_text_attends_to_nothing() -> None:
    model, batch = small_model(), batch_of()
    ids, zero = batch["codes"].long()[:, :-1], torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        a = model(ids, batch["text"], zero)
        b = model(ids, batch["text"].flip(1), zero)
        c = model(ids, batch["text"], batch["text_length"])
    assert a.isfinite().all()
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (a - c).abs().max() > 1e-3


def test_a_row_without_text_has_a_finite_gradient() -> None:
    model, batch = small_model().train(), batch_of()
    batch["text_length"] = torch.tensor([0, 3])
    loss = MusicLoss(model, SPECIALS, "all", [], ["0", "1", "2"])(batch, Draw(0, 0, np.arange(2)))
    loss.sum.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("masking", "per_row"), [("codes", 0), ("codes_eos", 3), ("all", None)])
def test_what_counts(masking: str, per_row: int | None) -> None:
    model, batch = small_model().requires_grad_(False), batch_of()
    loss = MusicLoss(model, SPECIALS, masking, [], ["a", "b", "c"])(batch, Draw(0, 0, np.arange(2)))
    num_codes = (8 + 9) * 3
    steps = batch["codes"].shape[1] - 1
    assert int(loss.count) == (2 * steps * 3 if per_row is None else num_codes + 2 * per_row)
    assert int(loss.parts["codes_only"][1]) == num_codes
    assert int(loss.parts["special"][1]) == 2 * steps * 3 - num_codes
    by_channel = sum(float(loss.parts[f"codebook/{name}"][0]) for name in "abc")
    assert by_channel == pytest.approx(float(loss.parts["codes_only"][0]), rel=1e-5)
    whole = float(loss.parts["codes_only"][0] + loss.parts["special"][0])
    if masking == "codes":
        assert float(loss.sum) == pytest.approx(by_channel, rel=1e-5)
    elif masking == "all":
        assert float(loss.sum) == pytest.approx(whole, rel=1e-5)
    else:
        assert by_channel < float(loss.sum) < whole


@pytest.mark.parametrize("masking", ["codes", "codes_eos", "all"])
def test_the_entropy_is_of_all_predictions_that_count(masking: str) -> None:
    model, batch = small_model(), batch_of()
    loss = MusicLoss(model, SPECIALS, masking, [1, 0.5, 2], ["a", "b", "c"])(batch, Draw(0, 0, np.arange(2)))
    targets = batch["codes"].long()[:, 1:]
    with torch.no_grad():
        logits = model(batch["codes"].long()[:, :-1], batch["text"], batch["text_length"])
    counted = targets <= {"codes": SIZE - 1, "codes_eos": SPECIALS.eos, "all": SPECIALS.vocab_size}[masking]
    expected = torch.distributions.Categorical(logits=logits.double()).entropy()[counted]
    total, count = loss.parts["entropy"]
    assert (total.dtype, total.requires_grad, int(count)) == (torch.float32, False, len(expected))
    assert float(total / count) == pytest.approx(float(expected.mean()), rel=1e-5)


def test_channel_weights() -> None:
    model, batch, draw = small_model(), batch_of(), Draw(0, 0, np.arange(2))
    one = MusicLoss(model, SPECIALS, "codes", [0, 2, 0], ["a", "b", "c"])(batch, draw)
    assert float(one.sum / one.count) == pytest.approx(float(one.parts["codebook/b"][0] / one.parts["codebook/b"][1]))


def params(num_frames: int, **more: object) -> SamplingParams:
    return replace(SamplingParams(num_frames, temperature=0), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_cached_decoding_is_a_full_forward(scale: float) -> None:
    model, (text, length) = small_model(), texts(2, 12, 5)
    made = generate(model, text, length, params(14, guidance_scale=scale), DELAYS, SPECIALS)
    pattern = DelayPattern(DELAYS, 14, SPECIALS, has_end=False)
    rows = pattern.lay_out(np.stack(made), np.array([14, 14]), np.zeros(2, bool)).astype(np.int64)
    ids = torch.from_numpy(rows)
    with torch.no_grad():
        logits = model(ids[:, :-1], text, length)
        if scale != 1:
            without = model(ids[:, :-1], text, torch.zeros_like(length))
            logits = without + scale * (logits - without)
    best = logits[..., :SIZE].argmax(-1).numpy()
    is_code = rows[:, 1:] < SIZE
    assert is_code.sum() == 2 * 14 * 3
    np.testing.assert_array_equal(best[is_code], rows[:, 1:][is_code])


def test_a_prompt_is_kept_and_continued() -> None:
    model, (text, length) = small_model(), texts(1, 6)
    whole = generate(model, text, length, params(12), DELAYS, SPECIALS)[0]
    for num_given in (1, 5, 11):
        made = generate(model, text, length, params(12), DELAYS, SPECIALS, prompt_TC=whole[:num_given])[0]
        np.testing.assert_array_equal(made, whole)
    other = (whole[:5] + 1) % SIZE
    made = generate(model, text, length, params(12), DELAYS, SPECIALS, prompt_TC=other)[0]
    np.testing.assert_array_equal(made[:5], other)


def test_channels_that_are_ahead_go_on_beyond_the_clip() -> None:
    """Then a clip is the beginning of a longer one, to the last code of the latest channel."""
    model, (text, length) = small_model(), texts(1, 6)
    longer = generate(model, text, length, params(20), DELAYS, SPECIALS)[0]
    made = generate(model, text, length, params(12, num_beyond=max(DELAYS)), DELAYS, SPECIALS)[0]
    np.testing.assert_array_equal(made, longer[:12])
    assert not np.array_equal(generate(model, text, length, params(12), DELAYS, SPECIALS)[0], made)


class Ends(MusicModel):
    """Wants to end a piece at one step."""

    end_at = 5
    seen = 0

    def logits(self, x_BSW: torch.Tensor) -> torch.Tensor:
        found = super().logits(x_BSW)
        if self.seen == self.end_at:
            found[..., 0, SPECIALS.eos] = 100
        self.seen += 1
        return found


def test_the_end_is_emitted_as_it_is_laid_out() -> None:
    model, (text, length) = small_model(), texts(1, 6)
    model.__class__, model.seen = Ends, 0  # type: ignore[assignment]
    [made] = generate(model, text, length, params(20, can_end=True), DELAYS, SPECIALS)
    assert made.shape == (5, 3)
    assert (made < SIZE).all()
    model.seen, model.end_at = 0, 12  # type: ignore[assignment]
    [whole] = generate(model, text, length, params(11, can_end=True, num_beyond=2), DELAYS, SPECIALS)
    assert whole.shape == (11, 3)  # it ends after what was asked for
    assert (whole < SIZE).all()
    model.seen, model.end_at = 0, 5  # type: ignore[assignment]
    [never] = generate(model, text, length, params(20, can_end=False), DELAYS, SPECIALS)
    assert never.shape == (20, 3)


def test_guidance_as_in_transformers() -> None:
    processing = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(2 * 3, 1, dtype=torch.long)
    theirs = processing.DiaClassifierFreeGuidanceLogitsProcessor(3.0, guidance_top_k=5)
    expected = theirs(ids, logits.flatten(0, 1)).view(2, 3, 20)
    found = guide(logits, SamplingParams(1, guidance="dia", guidance_scale=3.0, top_k=5))
    torch.testing.assert_close(found, expected)
    musicgen = processing.ClassifierFreeGuidanceLogitsProcessor(3.0)
    expected = musicgen(ids, logits.flatten(0, 1)).view(2, 3, 20)
    torch.testing.assert_close(guide(logits, SamplingParams(1, guidance_scale=3.0)), expected)


def test_only_the_likeliest_end_is_drawn_as_in_transformers() -> None:
    processing = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(64, 3, 20, generator=torch.Generator().manual_seed(0))
    logits[::2, 0, SPECIALS.eos] += 4
    theirs = processing.DiaEOSChannelFilterLogitsProcessor(num_channels=3, eos_token_id=SPECIALS.eos)
    expected = theirs(torch.zeros(1), logits.clone().flatten(0, 1)).view(64, 3, 20)
    found = restrict(logits, SPECIALS, leader=0)
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1))
    assert 5 < int((found.argmax(-1)[:, 0] == SPECIALS.eos).sum()) < 60


@pytest.mark.parametrize("init", ["xavier", "depth_scaled", "normal"])
def test_weights_have_the_spread_of_their_true_fans(init: str) -> None:
    cfg = keys.Model(n_layer=3, n_embd=192, n_head=4, n_kv_head=2, init=init)  # type: ignore[arg-type]
    model = MusicModel(cfg, num_channels=3, vocab_size=20, num_steps=40, text_length=12, seed=0)
    out = model.decoder.blocks[0].attn.out.weight  # type: ignore[union-attr]
    xavier = (2 / (192 + 192)) ** 0.5
    expected = {"xavier": xavier, "depth_scaled": xavier / 6**0.5, "normal": 0.02 / 6**0.5}[init]
    assert float(out.detach().std()) == pytest.approx(expected, rel=0.05)


def test_attention_logits_begin_alike_for_any_width_of_a_head() -> None:
    for head_dim in (16, 64):
        cfg = keys.Model(n_layer=1, n_embd=128, n_head=2, n_kv_head=2, head_dim=head_dim)
        model = MusicModel(cfg, num_channels=3, vocab_size=20, num_steps=40, text_length=12, seed=0)
        x = torch.randn(4, 30, 128, generator=torch.Generator().manual_seed(0))
        q, k, _ = model.decoder.blocks[0].attn.qkv(x).split(2 * head_dim, dim=-1)  # type: ignore[union-attr,operator]
        q, k = (y.unflatten(-1, (2, head_dim)).transpose(1, 2) for y in (q, k))
        variance = float((q @ k.transpose(-1, -2) / head_dim**0.5).detach().var())
        assert 0.2 < variance < 5
