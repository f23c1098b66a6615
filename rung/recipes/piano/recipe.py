"""The piano recipe: a GPT that continues performances.

Data, model and sound are imported when they are used, so that the keys of the recipe can be listed without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rung.errors import DataError, UserError
from rung.recipe import Batch, Draw, Input, Objective, Recipe, Report, Sample, Stream
from rung.recipes.piano import config as keys
from rung.recipes.piano.tokenizer import CLS, PAD, VOCAB_SIZE, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rung.data.store import Store
    from rung.data.stream import Windows
    from rung.nn.transformer import Transformer

SPLITS = {"train": "train", "full_val": "validation"}  # stream -> split of the store


class Piano(Recipe):
    Config = keys.Config
    cfg: keys.Config

    def __init__(self, cfg: keys.Config, seed: int) -> None:
        super().__init__(cfg, seed)
        self.tokenizer = Tokenizer()
        # One choice each so far, and samples come late: read here, they do not look unused after the first eval.
        self._what = (cfg.stage, cfg.loss_masking)
        how = cfg.sampling
        self._num_samples, self._num_tokens = how.num_samples, how.num_tokens
        self._temperature, self._top_k, self._top_p = how.temperature, how.top_k or None, how.top_p

    def streams(self) -> Mapping[str, Stream]:
        store = self._store()
        return {name: self._windows(store, split) for name, split in SPLITS.items()}

    def held_out(self, split: str) -> Mapping[str, Stream]:
        return {split: self._windows(self._store(), split)}

    def _windows(self, store: Store, split: str) -> Windows:
        from rung.data.stream import Windows

        windows = Windows(store, split, self.cfg.data.context_size, PAD, group="composer")
        windows.baselines = {"unigram": unigram_of(store, split)}
        windows.about = {"source": store.info.get("source"), "split": split, "tokenizer": self.tokenizer.hash}
        return windows

    def _store(self) -> Store:
        from rung.data.store import Store, place

        path = place(self.cfg.dataset.base_dataset_name)
        if not path.exists():
            raise DataError(
                f"no data at {path}; prepare it with `rung data piano`, or name another with dataset.base_dataset_name"
            )
        store = Store.open(path, kind="piano")
        if (wrote := store.info["tokenizer"]["hash"]) != self.tokenizer.hash:
            raise DataError(
                f"{path} was written by tokenizer {wrote}, this is {self.tokenizer.hash}; "
                "prepare it again with `rung data piano --replace`"
            )
        asked, was = self.cfg.dataset.pause_detection_threshold, store.info["settings"]["pause_detection_threshold"]
        if asked != was:
            raise DataError(
                f"dataset.pause_detection_threshold={asked:g}, but {path} was prepared with {was:g}; "
                "prepare it again with `rung data piano --replace`, or set it to what the data has"
            )
        return store

    def model(self) -> nn.Module:
        from rung.recipes.piano.model import build_model

        return build_model(self.cfg.model, self.seed)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        from rung.recipes.piano.model import NextToken

        transformer = cast("Transformer", model)
        return [
            Objective(
                "next_token", list(model.parameters()), NextToken(transformer), hidden=transformer.hidden_matrices()
            )
        ]

    def target_losses(self, model: nn.Module, batch: Batch, draw: Draw) -> tuple[Tensor, Tensor]:
        from rung.recipes.piano.model import losses_of

        return losses_of(cast("Transformer", model), batch)

    def inputs(self) -> Sequence[Input]:
        return [Input("context", ["tokens"], "permute")]

    def definition(self) -> Mapping[str, Any]:
        return {"loss": "cross entropy in nats", "mask": self.cfg.loss_masking, "ignored_ids": [PAD]}

    def identity(self) -> Mapping[str, Any]:
        return {"vocab_size": VOCAB_SIZE, "tokenizer": self.tokenizer.hash}

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        import torch

        from rung.nn.generate import generate

        transformer = cast("Transformer", model)
        device = transformer.norm.weight.device
        prompts = torch.full((self._num_samples, 1), CLS, device=device)
        ids = generate(
            transformer,
            prompts,
            self._num_tokens,
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p if self._top_p < 1 else None,
            generator=draw.generator("sample", device),
        )
        return [sample for number, row in enumerate(ids.cpu().numpy()) for sample in self._artifacts(number, row)]

    def _artifacts(self, number: int, ids: np.ndarray) -> Iterator[Sample]:
        from rung.recipes.piano.midi import write_midi
        from rung.recipes.piano.render import to_roll, to_wav

        notes = self.tokenizer.decode(ids)
        seconds = float(notes["end"].max()) if len(notes) else 0.0
        caption = f"{len(notes)} notes, {seconds:.1f} s, from nothing but <CLS>, temperature {self._temperature:g}"
        if not len(notes):
            caption = "no notes yet: train longer"
        yield Sample(f"sample-{number}.mid", write_midi(notes), caption)
        yield Sample(f"sample-{number}.png", to_roll(notes, title=caption), caption)
        try:
            sound = to_wav(notes)
        except UserError as error:  # no sound font on a machine without network: the notes are still worth having
            yield Sample(f"sample-{number}.no-sound.txt", f"{error}\n".encode(), "why there is no .wav")
            return
        yield Sample(f"sample-{number}.wav", sound.data, f"{caption}; played by {sound.engine}")

    @classmethod
    def prepare(
        cls, cfg: keys.Config, seed: int, source: Path | None, name: str | None, replace: bool, report: Report
    ) -> tuple[Path, str]:
        from rung.data.store import place
        from rung.recipes.piano.data import prepare

        out = place(name or cfg.dataset.base_dataset_name)
        summary = prepare(
            source,
            out,
            pause_detection_threshold=cfg.dataset.pause_detection_threshold,
            seed=seed,
            name=out.name,
            replace=replace,
            report=report,
        )
        return out, summary


def unigram_of(store: Store, split: str) -> float:
    """Nats per token of the best model that ignores all context, fitted to this very split."""
    return float(store.info["unigram_nats"][split])
