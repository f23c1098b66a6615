"""The speech recipe: ears for a frozen language model.

Data, model and sound are imported when they are used, so that the keys of the recipe can be listed without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rung.errors import ConfigError, DataError, UserError
from rung.random import Draw
from rung.recipe import (
    WHOLE_DYNAMIC,
    Answers,
    Batch,
    Identity,
    Input,
    Notes,
    Objective,
    Part,
    Plays,
    Prepares,
    Recipe,
    Report,
    Sample,
    Stream,
)
from rung.recipes.speech import config as keys

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rung.data.store import Store
    from rung.data.tokenizer import Tokenizer
    from rung.recipes.speech.encoders import Encoder
    from rung.recipes.speech.model import SpeechModel
    from rung.recipes.speech.samples import Asked
    from rung.recipes.speech.stream import Heard, Prompts, Utterances
    from rung.recipes.speech.windows import Windows


class Speech(Recipe, Prepares, Plays):
    Config = keys.Config
    cfg: keys.Config

    # Data

    @cached_property
    def store(self) -> Store:
        from rung.recipes.speech.data import open_store

        return open_store(self.cfg.dataset.base_dataset_name)

    @cached_property
    def stores(self) -> list[Store]:
        """All that is trained on, refused where features mean something else."""
        from rung.recipes.speech.data import open_store

        stores, base = [self.store], self.cfg.dataset.base_dataset_name
        for name in self.cfg.dataset.extra_datasets:
            store = open_store(name, "extra_datasets")
            ours, theirs = ([one["hash"] for one in s.info["encoders"]] for s in (self.store, store))
            if ours != theirs:
                problem = f"{name} was encoded by {_names(store)} {theirs}, {base} by {_names(self.store)} {ours}"
                raise DataError(f"{problem}; prepare one of them again with the other's", code="data-mismatch")
            stores.append(store)
        return stores

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from rung.recipes.speech.lm import open_tokenizer

        tokenizer = open_tokenizer(self.cfg.model.lm)
        if tokenizer.end is None:
            problem = f"the tokenizer of {self.cfg.model.lm.path} has no token that ends a text (eos_token)"
            raise ConfigError(f"{problem}; an answer could not end: name another model", code="not-supported")
        return tokenizer

    @cached_property
    def prompts(self) -> Prompts:
        from rung.recipes.speech.stream import Prompts

        prompts = Prompts(self.cfg.prompts, self.cfg.template, self.tokenizer)
        for task, texts in self.cfg.prompts.items():  # one that cannot be used is found now, not when it is drawn
            for number in range(len(texts)):
                prompts.ids(task, number, "?")
        return prompts

    @cached_property
    def tasks(self) -> list[str]:
        """Of the data, in the order of the alphabet."""
        found = {task for store in self.stores for one in store.info["counts"].values() for task in one["tasks"]}
        if unknown := sorted(found - self.cfg.prompts.keys()):
            problem = f"the data has the task {unknown[0]}, prompts has only {', '.join(sorted(self.cfg.prompts))}"
            raise ConfigError(f"{problem}; add prompts.{unknown[0]}, a list of texts", code="bad-value")
        return sorted(found)

    @cached_property
    def encoders(self) -> list[Encoder]:
        """As the store's, opened to hear something new."""
        from rung.recipes.speech.encoders import open_encoder

        opened = []
        wanted = [one for one in (self.cfg.encoder, self.cfg.second_encoder) if one.name != "none"]
        for one, was in zip(wanted, self.store.info["encoders"]):
            encoder = open_encoder(one.name, one.path)
            if encoder.hash != was["hash"]:
                problem = f"encoder {encoder.name} {encoder.hash[:8]}.., but {self.store.path} was encoded by"
                remedy = "name that one, or prepare the data again with `rung data speech --replace`"
                raise DataError(f"{problem} {was['name']} {was['hash'][:8]}..; {remedy}", code="data-mismatch")
            opened.append(encoder)
        return opened

    def _utterances(self, split: str, heard: Heard = "own") -> Utterances:
        from rung.recipes.speech.stream import Utterances

        data, is_train = self.cfg.data, split == "train"
        return Utterances(
            self.stores if is_train else [self.store], split, self.prompts, self.tasks, text_length=data.text_length,
            is_cached=data.cached, bucket=data.bucket if is_train else 1, heard=heard,
        )  # fmt: skip

    def streams(self, split: str | None = None) -> Mapping[str, Stream]:
        streams: dict[str, Stream] = {}
        if split is None:
            streams["train"] = self._utterances("train")
            if "validation" not in self.store.splits:
                return streams
        elif split not in self.store.splits:
            problem = f"{self.store.path} has no split {split!r}, only {', '.join(self.store.splits)}"
            raise UserError(problem, code="no-split")
        held_out = split or "validation"
        streams[held_out] = self._utterances(held_out)
        if self.cfg.evaluation.ablations and len(self.store.split(held_out)) > 1:
            streams["shuffled"] = self._utterances(held_out, "shuffled")
            streams["silent"] = self._utterances(held_out, "silent")
        return streams

    def inputs(self) -> Sequence[Input]:
        return [Input("audio", ["features", "frames"] if self.cfg.data.cached else ["sound", "samples"])]

    # Model and loss

    @cached_property
    def windows(self) -> Windows:
        from rung.recipes.speech.windows import Windows

        cfg = self.cfg.model.qformer
        return Windows.of(cfg.window_s, cfg.stride_s, self.frames_per_s, cfg.remainder)

    @property
    def frames_per_s(self) -> float:
        """Of what is cut into windows."""
        audio, rate = self.cfg.model.audio, float(self.store.info["encoders"][0]["frames_per_s"])
        return rate / audio.stack if audio.n_layer else rate

    def model(self) -> nn.Module:
        from rung.recipes.speech.lm import add_lora, open_lm
        from rung.recipes.speech.model import SpeechModel

        cfg = self.cfg.model
        lm = open_lm(cfg.lm, self.tokenizer.vocab_size)
        if cfg.lora.rank and cfg.lm.name != "bytes":
            add_lora(lm, cfg.lora)
        about = self.store.info["encoders"]
        longest = self.cfg.data.max_seconds + 2 * self.cfg.dataset.silence_s + 1
        return SpeechModel(
            cfg, lm, widths=[one["width"] for one in about], windows=self.windows,
            max_frames=round(longest * about[0]["frames_per_s"]), seed=self.seed,
            encoders=() if self.cfg.data.cached else self.encoders,
        )  # fmt: skip

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        from rung.recipes.speech.model import SpeechLoss

        speech = cast("SpeechModel", model)
        groups = speech.parameter_groups(self.cfg.model.qformer_lr_scale, self.cfg.model.lora.lr_scale)
        return [Objective("answer", groups, SpeechLoss(speech, self.tasks), compile=WHOLE_DYNAMIC)]

    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> Mapping[str, Part]:
        """The word error rate of the first rows of a set; sets with other sounds have none."""
        import torch

        from rung.recipes.speech.metrics import word_errors

        cfg = self.cfg.evaluation
        if not cfg.wer_rows or not bool(batch["is_own"].all()):
            return {}
        device = batch["tokens"].device
        chosen = torch.from_numpy(np.flatnonzero(draw.rows < cfg.wer_rows)).to(device)
        sums = {task: [0, 0] for task in self.tasks}
        if len(chosen):
            some = {name: tensor[chosen] for name, tensor in batch.items()}
            answers = self._answers(model, some, cfg.num_tokens, cfg.beams)
            rows = zip(some["tokens"].tolist(), some["answer_length"].tolist(), some["task"].tolist(), answers)
            for tokens, length, task, answer in rows:
                right = self.tokenizer.decode([one for one in tokens[1 : length + 1] if one != self.tokenizer.end])
                errors = word_errors([right], [answer])
                sums[self.tasks[task]][0] += errors.errors
                sums[self.tasks[task]][1] += errors.words
        parts = {f"wer/{task}": (errors, words) for task, (errors, words) in sums.items() if len(sums) > 1}
        parts["wer"] = tuple(map(sum, zip(*sums.values())))  # type: ignore[assignment]
        return {
            name: (torch.tensor(float(errors), device=device), torch.tensor(float(words), device=device))
            for name, (errors, words) in parts.items()
        }

    def _answers(self, model: nn.Module, batch: Batch, num_tokens: int, beams: int) -> list[str]:
        from rung.recipes.speech.model import answer

        assert self.tokenizer.end is not None
        found = answer(cast("SpeechModel", model), batch, self.tokenizer.end, num_tokens, beams)
        return [self.tokenizer.decode(ids) for ids in found]

    def identity(self) -> Identity:
        lm, encoders = self.cfg.model.lm, self.store.info["encoders"]
        return Identity(
            {
                "tokenizer": self.tokenizer.hash, "lm": lm.name if lm.name != "folder" else Path(lm.path).name,
                "encoders": [f"{one['name']} {one['hash']}" for one in encoders], "windows": list(self.windows),
            },
            {
                "loss": "cross entropy in nats", "mask": "the answer and its end", "prompts": self.cfg.prompts,
                "template": self.cfg.template, "text_length": self.cfg.data.text_length,
            },
        )  # fmt: skip

    def describe(self, init_from: str) -> Notes:
        info, cfg = self.store.info, self.cfg
        errors = []
        asks = any(record.get("question") for record in self.store.index)
        for task in self.tasks if asks else ():
            if task != "asr" and not any("{}" in text for text in cfg.prompts[task]):
                errors.append(f"utterances of {task} ask questions, and no text of prompts.{task} has a {{}} for them")
        train = self._utterances("train")
        per_s = cfg.model.qformer.queries * self.frames_per_s / self.windows.stride
        lines = [
            f"{_names(self.store)} -> windows of {self.windows.size} frames every {self.windows.stride} -> "
            f"{cfg.model.qformer.queries} vectors each, {per_s:.3g} a second, for {cfg.model.lm.name}",
            f"in batches of 8, {100 * train.padding(8, self.seed):.0f} % of the frames are padding",
        ]
        if not cfg.data.cached:
            lines.append("data.cached=false: the encoder runs at every step, though its features lie in the store")
        # Keys of preparation that differ from how it was done would silently do nothing.
        here: dict[str, Any] = {
            "encoder.name": cfg.encoder.name, "encoder.path": cfg.encoder.path,
            "second_encoder.name": cfg.second_encoder.name, "second_encoder.path": cfg.second_encoder.path,
            "dataset.normalise": cfg.dataset.normalise, "dataset.silence_s": cfg.dataset.silence_s,
            "dataset.sentences": cfg.dataset.sentences, "dataset.utterances": cfg.dataset.utterances,
            "dataset.held_out": cfg.dataset.held_out, "dataset.speeds": list(cfg.dataset.speeds),
            "data.max_seconds": cfg.data.max_seconds,
        }  # fmt: skip
        was = info["settings"]
        if differing := [
            f"{name} is {was[name]}, not {value}" for name, value in here.items() if was.get(name, value) != value
        ]:
            lines.append(f"decided when the data was prepared: {'; '.join(differing)}")
        if cfg.model.lm.name == "bytes":
            lora = ("rank", "alpha", "dropout", "modules")
            unused = {f"model.lora.{one}": "bytes is trained whole, without LoRA" for one in lora}
            unused |= {f"model.lm.{one}": "bytes is made here, in float32" for one in ("path", "dtype", "load_in_8bit")}
        else:
            size = ("n_layer", "n_head", "n_embd")
            unused = {f"model.lm.{one}": "only bytes takes its size from here" for one in size}
        if not cfg.model.audio.n_layer:
            unused |= {f"model.audio.{one}": "model.audio.n_layer=0" for one in ("n_head", "n_embd", "stack")}
        return Notes(errors, lines, unused)

    # Samples

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        from rung.recipes.speech.samples import asked_of_file, samples_of

        cfg = self.cfg.sampling
        if cfg.prompt:
            asked = [asked_of_file(cfg.prompt, cfg.question, self.cfg.dataset, self.cfg.data.max_seconds)]
        else:
            asked = self._held_out(cfg.num_samples, cfg.question)
        batch = self._batch_of(asked, next(model.parameters()).device)
        return samples_of(asked, self._answers(model, batch, cfg.num_tokens, cfg.beams))

    def player(self, model: nn.Module) -> Answers:
        from rung.recipes.speech.player import SpeechPlayer

        def answer(asked: Asked, num_tokens: int, beams: int) -> str:
            batch = self._batch_of([asked], next(model.parameters()).device)
            return self._answers(model, batch, num_tokens, beams)[0]

        return SpeechPlayer(answer, self.cfg)

    def _held_out(self, num: int, question: str) -> list[Asked]:
        from rung.recipes.speech.samples import Asked

        split = "validation" if "validation" in self.store.splits else "train"
        rows = self.store.split(split)
        found = []
        for number in (rows[n * len(rows) // num] for n in range(min(num, len(rows)))):
            record = self.store.index[number]
            sound = self.store.arrays["sound"][record["start"] : record["start"] + record["length"]]
            task = "qa" if question else record["task"]
            reference = None if question else record["text"]
            found.append(Asked(record["source"], np.array(sound), task, question or record["question"], reference))
        return found

    def _batch_of(self, asked: Sequence[Asked], device: torch.device) -> Batch:
        """A batch without answers, whose sounds are encoded here."""
        import torch

        from rung.recipes.speech.encoders import encode
        from rung.recipes.speech.stream import pad_ids, pad_rows

        where = str(device)
        for encoder in self.encoders:
            encoder.to(device)
        features = [encode(self.encoders, one.sound.astype(np.float32) / 32767, where) for one in asked]
        pairs = [self.prompts.ids(one.task, 0, one.question) for one in asked]
        arrays = {"features": pad_rows(features), "frames": np.array([len(one) for one in features], np.int32)}
        arrays["before"], arrays["before_length"] = pad_ids([before for before, _ in pairs], 1)
        arrays["after"], arrays["after_length"] = pad_ids([after[:-1] for _, after in pairs], 1)
        arrays["tokens"] = np.stack([after[-1:] for _, after in pairs]).astype(np.int32)
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}

    # Preparation

    @classmethod
    def prepare(
        cls,
        cfg: keys.Config,
        seed: int,
        source: Path | None,
        name: str | None,
        replace: bool,
        report: Report,
        device: str = "auto",
    ) -> tuple[Path, str]:
        from rung.data.store import place
        from rung.recipes.speech.data import prepare

        name = name or cfg.dataset.base_dataset_name
        out = place(name)
        return out, prepare(source, out, cfg, seed=seed, name=name, replace=replace, report=report, device=device)


def _names(store: Store) -> str:
    return " and ".join(one["name"] for one in store.info["encoders"])
