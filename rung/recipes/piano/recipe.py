"""The piano recipe: a GPT that continues performances, and answers what it is asked about them.

Data, model and sound are imported when they are used, so that the keys of the recipe can be listed without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rung.errors import CheckpointError, UserError
from rung.random import Draw
from rung.recipe import (
    Answers,
    Batch,
    Exports,
    Identity,
    Input,
    Notes,
    Objective,
    Part,
    Plays,
    Prepares,
    Pretrained,
    Recipe,
    Report,
    Sample,
    Stream,
)
from rung.recipes.piano import config as keys
from rung.recipes.piano.tasks import TASKS, Task, parse, prefix_of
from rung.recipes.piano.tokenizer import CLS, EOGENAI, GENAI, PAD, VOCAB_SIZE, Tokenizer
from rung.text import one_line

if TYPE_CHECKING:
    from torch import nn

    from rung.nn.transformer import Transformer
    from rung.recipes.piano.samples import Prompt
    from rung.recipes.piano.sets import Sets


NUM_TRIED = 64  # rows of the eval set that are looked at for one that is whole


class Piano(Recipe, Prepares, Pretrained, Exports, Plays):
    Config = keys.Config
    cfg: keys.Config

    def __init__(self, cfg: keys.Config, seed: int) -> None:
        super().__init__(cfg, seed)
        self.tokenizer = Tokenizer()
        self.is_task = cfg.stage == "piano_task"
        self.choices = parse(cfg.tasks) if self.is_task else []
        self._masking, self._completed = cfg.loss_masking, cfg.evaluation.completed
        self._num_samples = cfg.evaluation.samples
        self._has_grammar, self._has_end = cfg.loss_grammar, cfg.data.end_token and not self.is_task

    # What is learned

    def describe(self, init_from: str) -> Notes:
        lines = [one_line(remark) for remark in self.sets.remarks]  # they hold names of data
        if not self.is_task:
            by_tokens = "stage=next_token_pretraining cuts rows by tokens, not by notes"
            unused = {"data.notes_per_record": by_tokens, "tasks": "stage=next_token_pretraining has none"}
            return Notes((), lines, unused)
        errors = []
        if init_from == "scratch_next_token":
            errors.append(
                "stage=piano_task with init_from=scratch_next_token asks for two things: to answer tasks, and to begin "
                "a next-token model from nothing. Name what to fine-tune (init_from=piano/7, a checkpoint, a GPT-2 "
                "folder), or set init_from=scratch to learn tasks from nothing, or stage=next_token_pretraining"
            )
        if self.cfg.tasks == "TODO":
            lines.append(f"tasks=TODO is not decided yet: all {len(self.choices)} tasks, equally often")
        unused = {"evaluation.samples": "stage=piano_task makes nothing from nothing"}
        if not self._completed:
            unused["evaluation.ngram"] = "evaluation.completed=0 completes no rows"
        return Notes(errors, lines, unused)

    # Data

    @cached_property
    def sets(self) -> Sets:
        from rung.recipes.piano.sets import Sets

        return Sets(self.cfg, self.choices)

    def streams(self, split: str | None = None) -> Mapping[str, Stream]:
        if split is not None:
            return {split: self.sets.held_out(split)}
        return {"train": self.sets.train(), **self.sets.evals}

    def inputs(self) -> Sequence[Input]:
        # Tokens and task are all of a batch: only the order of its rows can be taken away.
        if self.is_task:
            return [Input("context", ["tokens", "task"], "permute")]
        has_state = self._has_grammar or self.cfg.model.sounding_keys
        return [Input("context", ["tokens", "sounding"] if has_state else ["tokens"], "permute")]

    # Model and loss

    def model(self) -> nn.Module:
        from rung.recipes.piano.model import build_model

        return build_model(self.cfg.model, self.seed)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        from rung.recipes.piano.model import PianoLoss
        from rung.recipes.piano.rows import NUM_PREFIX, labels_of

        transformer = cast("Transformer", model)
        num_given = NUM_PREFIX if self.cfg.data.prefix_tokens and not self.is_task else 0
        loss = PianoLoss(
            transformer, self._masking == "finetuning", num_given, labels_of(self.choices), self._has_grammar,
            self._has_end,
        )  # fmt: skip
        return [Objective("next_token", transformer.parameter_groups(), loss, blocks=list(transformer.blocks))]

    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> Mapping[str, Part]:
        transformer, found = cast("Transformer", model), dict[str, "Part"]()
        # By their places alone, so that runs of other seeds complete the same rows.
        chosen = np.flatnonzero(Draw(0, draw.step, draw.rows).uniform("completed")[:, 0] < self._completed)
        if len(chosen):
            from rung.recipes.piano.samples import from_row, measure_completions

            rows = batch["tokens"].cpu().numpy()[chosen]  # CUDA cannot index uint16
            known = batch.get("sounding")
            sounding = [None] * len(chosen) if known is None else list(known.cpu().numpy()[chosen])
            prompts = [prompt for row, keys in zip(rows, sounding) if (prompt := from_row(row, keys, self._has_end))]
            generator = draw.generator("completed", transformer.norm.weight.device)
            found |= measure_completions(transformer, prompts, self.cfg.sampling, generator, self.sets.ngram)
        if self._num_samples and not self.is_task and (draw.rows == 0).any():  # once in each set
            from rung.recipes.piano.samples import from_nothing, measure_plausibility

            prefix = prefix_of(self.sets.trained_on, self.cfg.sampling.composer) if self.cfg.data.prefix_tokens else []
            prompts = [from_nothing(prefix, self._has_end)] * self._num_samples
            generator = draw.generator("samples", transformer.norm.weight.device)
            found |= measure_plausibility(
                transformer, prompts, self.cfg.sampling, generator, self.sets.held_out_notes, self.sets.copies
            )
        return found

    def identity(self) -> Identity:
        tokenizer = self.tokenizer
        loss = "cross entropy in nats"
        if self._has_grammar:
            loss += " among the tokens that can come next"
        return Identity(
            {"vocab_size": VOCAB_SIZE, "specials": list(tokenizer.specials), "tokenizer": tokenizer.hash},
            {"loss": loss, "mask": self._masking, "ignored_ids": [PAD]},
        )

    # Samples

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        from rung.recipes.piano.samples import artifacts, complete

        transformer = cast("Transformer", model)
        prompts = self._prompts()
        generator = draw.generator("sample", transformer.norm.weight.device)
        made = complete(transformer, prompts, self.cfg.sampling, generator)
        return [
            sample
            for number, (prompt, one) in enumerate(zip(prompts, made))
            for sample in artifacts(number, prompt, one, self.cfg.sampling)
        ]

    def _prompts(self) -> list[Prompt]:
        from rung.recipes.piano.samples import from_file, from_nothing

        keys, has_prefix = self.cfg.sampling, self.cfg.data.prefix_tokens
        if keys.composer and not has_prefix:
            raise UserError(
                f"sampling.composer={keys.composer}: this run has learned no composers (data.prefix_tokens=false)",
                code="not-supported",
            )
        if not self.is_task and (keys.task not in ("", "continuation") or keys.parameters):
            asked = f"sampling.task={keys.task}" if keys.task else f"sampling.parameters={list(keys.parameters)}"
            raise UserError(
                f"{asked} is for a run of stage=piano_task; this one only continues a prompt", code="not-supported"
            )
        task: Task | None = None  # predict the next token
        values: tuple[int, ...] = ()
        if self.is_task:
            by_name = {choice.task.name: choice for choice in self.choices}
            choice = by_name.get(keys.task or "continuation", None if keys.task else self.choices[0])
            if choice is None:
                what = "is not a task" if keys.task not in TASKS else "is not among what this run has learned"
                raise UserError(f"sampling.task={keys.task} {what}; it knows {', '.join(by_name)}", code="no-task")
            task, values = choice.task, tuple((low + high) // 2 for low, high in choice.ranges)
            if keys.parameters:
                values = task.values_of(keys.parameters)
        prefix = prefix_of(self.sets.trained_on, keys.composer) if has_prefix else []
        if keys.prompt:
            context, may_fit = self.cfg.data.context_size, not keys.parameters
            prompt = from_file(
                Path(keys.prompt), task, values, context_size=context, prefix=prefix, may_fit=may_fit,
                may_end=self._has_end,
            )  # fmt: skip
            return [prompt] * keys.num_samples
        return (
            self._held_out_prompts(task) if self.is_task else [from_nothing(prefix, self._has_end)] * keys.num_samples
        )

    def _held_out_prompts(self, task: Task | None) -> list[Prompt]:
        """Of the eval set, the same every time: one task after the other, or the one that was asked for."""
        from rung.recipes.piano.samples import from_row

        rows, num = next(iter(self.sets.evals.values())), self.cfg.sampling.num_samples
        asked = [n for n, choice in enumerate(self.choices) if choice.task is task]
        order = asked if self.cfg.sampling.task else list(range(len(self.choices)))
        num_stretches = rows.num_rows // len(self.choices)
        prompts = []
        for number in range(num):
            first, task_rows = number * num_stretches // num, order[number % len(order)] * num_stretches
            ids = task_rows + (first + np.arange(min(num_stretches, NUM_TRIED))) % num_stretches
            tokens = rows.gather(ids, Draw(0, -1, ids))["tokens"]
            prompts += [prompt for prompt in map(from_row, tokens) if prompt is not None][:1]  # others were cut
        if not prompts:
            raise UserError(
                f"data.context_size={self.cfg.data.context_size} holds no whole row of "
                f"data.notes_per_record={self.cfg.data.notes_per_record} notes; give sampling.prompt",
                code="too-large",
            )
        return prompts

    def player(self, model: nn.Module) -> Answers:
        from rung.recipes.piano.player import PianoPlayer

        trained_on = self.sets.trained_on if self.cfg.data.prefix_tokens else None
        return PianoPlayer(cast("Transformer", model), self.cfg.sampling, self.choices, trained_on, self._has_end)

    # Weights of others

    @classmethod
    def config_from_pretrained(cls, source: Path) -> Mapping[str, Any]:
        from rung.nn.pretrained import config_from_pretrained

        found = config_from_pretrained(source)
        return {"model": {**found["model"], "positions": "learned", "sounding_keys": False}}

    def load_pretrained(self, model: nn.Module, source: Path) -> str:
        from rung.nn.pretrained import load_pretrained, tokenizer_of

        if self.cfg.model.sounding_keys:
            raise CheckpointError(
                f"{source} knows nothing of sounding keys; set model.sounding_keys=false, or leave it out and it "
                "follows the weights",
                code="checkpoint-mismatch",
            )
        theirs = tokenizer_of(source)
        has_same_ids = None if theirs is None else theirs == self.tokenizer.hash
        return load_pretrained(cast("Transformer", model), source, has_same_ids)

    def export_hf(self, model: nn.Module, folder: Path) -> Sequence[str]:
        from rung.nn import hf
        from rung.nn.pretrained import VOCABULARY

        if self.cfg.model.sounding_keys:
            raise CheckpointError(
                "model.sounding_keys=true: transformers has no model that is told which keys sound; export a run of "
                "model.sounding_keys=false",
                code="not-supported",
            )
        special = {"bos_token_id": CLS, "pad_token_id": PAD, "eos_token_id": EOGENAI}
        hf.save(cast("Transformer", model), folder, special)
        # transformers knows no tokenizer of notes: what the ids mean is written beside the weights.
        about = {
            "names": list(self.tokenizer.names),  # the id of a name is its place
            "special_ids": {self.tokenizer.names[id]: id for id in (PAD, CLS, GENAI, EOGENAI)},
            "tokenizer": self.tokenizer.description,
        }
        (folder / VOCABULARY).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
        return [hf.CONFIG, hf.WEIGHTS, VOCABULARY]

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
        from rung.recipes.piano.data import prepare

        name = name or cfg.dataset.base_dataset_name
        out, threshold_s, sustain = place(name), cfg.dataset.pause_detection_threshold, bool(cfg.dataset.sustain)
        summary = prepare(
            source, out, pause_detection_threshold=threshold_s, sustain=sustain, seed=seed, name=name, replace=replace,
            report=report,
        )  # fmt: skip
        return out, summary
