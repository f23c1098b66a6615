"""The piano recipe: a GPT that continues performances, and answers what it is asked about them.

Data, model and sound are imported when they are used, so that the keys of the recipe can be listed without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rung.errors import ConfigError, UserError
from rung.recipe import Batch, Draw, Input, Objective, Part, Recipe, Report, Sample, Stream
from rung.recipes.piano import config as keys
from rung.recipes.piano.tasks import TASKS, Task, parse
from rung.recipes.piano.tokenizer import PAD, VOCAB_SIZE, Tokenizer
from rung.text import one_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rung.nn.transformer import Transformer
    from rung.recipes.piano.model import Counted
    from rung.recipes.piano.samples import How, Prompt
    from rung.recipes.piano.sets import Sets


class Piano(Recipe):
    Config = keys.Config
    cfg: keys.Config

    def __init__(self, cfg: keys.Config, seed: int) -> None:
        super().__init__(cfg, seed)
        self.tokenizer = Tokenizer()
        self.is_task = cfg.stage == "piano_task"
        self.choices = parse(cfg.tasks) if self.is_task else []
        # Samples and completions come late: read here, their keys do not look unused after the first eval.
        self._sampling, self._masking = {name: getattr(cfg.sampling, name) for name in SAMPLING}, cfg.loss_masking
        self._completed = cfg.evaluation.completed

    # What is learned

    def check_start(self, init_from: str) -> None:
        if self.is_task and init_from == "scratch_next_token":
            raise ConfigError(
                "stage=piano_task with init_from=scratch_next_token asks for two things: to answer tasks, and to begin "
                "a next-token model from nothing. Name what to fine-tune (init_from=piano/7, a checkpoint, a GPT-2 "
                "folder), or set init_from=scratch to learn tasks from nothing, or stage=next_token_pretraining"
            )

    def remarks(self) -> Sequence[str]:
        said = [one_line(remark) for remark in self.sets.remarks]  # they hold names of data
        if self.is_task and self.cfg.tasks == "TODO":
            said.append(f"tasks=TODO is not decided yet: all {len(self.choices)} tasks, equally often")
        return said

    def unused(self) -> Mapping[str, str]:
        if self.is_task:
            return {} if self._completed else {"evaluation.ngram": "evaluation.completed=0 completes no rows"}
        by_tokens = "stage=next_token_pretraining cuts rows by tokens, not by notes"
        return {"data.notes_per_record": by_tokens, "tasks": "stage=next_token_pretraining has none"}

    # Data

    @cached_property
    def sets(self) -> Sets:
        from rung.recipes.piano.sets import Sets

        return Sets(self.cfg, self.choices)

    def streams(self) -> Mapping[str, Stream]:
        return {"train": self.sets.train(), **self.sets.evals}

    def held_out(self, split: str) -> Mapping[str, Stream]:
        return {split: self.sets.held_out(split)}

    def inputs(self) -> Sequence[Input]:
        # With the task, which the model is told by a token, this is all of a batch: only its order is taken away.
        return [Input("context", ["tokens", "task"] if self.is_task else ["tokens"], "permute")]

    # Model and loss

    def model(self) -> nn.Module:
        from rung.recipes.piano.model import build_model

        return build_model(self.cfg.model, self.seed)

    @cached_property
    def _counted(self) -> Counted:
        from rung.recipes.piano.model import Counted
        from rung.recipes.piano.rows import NUM_PREFIX

        num_given = NUM_PREFIX if self.cfg.data.prefix_tokens and not self.is_task else 0
        return Counted(self._masking == "finetuning", num_given)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        from rung.recipes.piano.model import PianoLoss
        from rung.recipes.piano.rows import labels_of

        transformer = cast("Transformer", model)
        loss = PianoLoss(transformer, self._counted, labels_of(self.choices))
        return [Objective("next_token", list(model.parameters()), loss, hidden=transformer.hidden_matrices())]

    def target_losses(self, model: nn.Module, batch: Batch, draw: Draw) -> tuple[Tensor, Tensor]:
        from rung.recipes.piano.model import losses_of

        return losses_of(cast("Transformer", model), batch, self._counted)

    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> Mapping[str, Part]:
        # By their places alone, so that runs of other seeds complete the same rows.
        chosen = np.flatnonzero(Draw(0, draw.step, draw.rows).uniform("completed")[:, 0] < self._completed)
        if not len(chosen):
            return {}
        from rung.recipes.piano.completion import measure_completions

        transformer = cast("Transformer", model)
        rows = batch["tokens"].cpu().numpy()[chosen]  # CUDA cannot index uint16
        generator = draw.generator("completed", transformer.norm.weight.device)
        return measure_completions(transformer, rows, self._how, generator, self.sets.ngram)

    def definition(self) -> Mapping[str, Any]:
        return {"loss": "cross entropy in nats", "mask": self._masking, "ignored_ids": [PAD]}

    def identity(self) -> Mapping[str, Any]:
        tokenizer = self.tokenizer
        return {"vocab_size": VOCAB_SIZE, "specials": list(tokenizer.specials), "tokenizer": tokenizer.hash}

    # Samples

    @cached_property
    def _how(self) -> How:
        from rung.recipes.piano.samples import How

        how = self._sampling
        return How(how["num_tokens"], how["temperature"], how["top_k"] or None,
                   how["top_p"] if how["top_p"] < 1 else None, how["grammar"])  # fmt: skip

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        from rung.recipes.piano.samples import artifacts, make_all

        transformer = cast("Transformer", model)
        prompts = self._prompts()
        generator = draw.generator("sample", transformer.norm.weight.device)
        made = make_all(transformer, prompts, self._how, generator)
        return [
            sample
            for number, (prompt, one) in enumerate(zip(prompts, made))
            for sample in artifacts(number, prompt, one.notes, self._how, one.cut_at)
        ]

    def _prompts(self) -> list[Prompt]:
        from rung.recipes.piano.samples import from_file, from_nothing

        num, path, prefix = self._sampling["num_samples"], self._sampling["prompt"], self._prefix()
        task, values = self._task()
        if path:
            context = self.cfg.data.context_size
            may_fit = not self._sampling["parameters"]
            return [from_file(Path(path), task, values, context_size=context, prefix=prefix, may_fit=may_fit)] * num
        return self._held_out_prompts(num, task) if self.is_task else [from_nothing(prefix)] * num

    def _task(self) -> tuple[Task | None, tuple[int, ...]]:
        """What is to be done with a prompt, and with which parameters; None: go on with the next token."""
        name, given = self._sampling["task"], tuple(self._sampling["parameters"])
        if not self.is_task:
            if name not in ("", "continuation") or given:
                asked = f"sampling.task={name}" if name else f"sampling.parameters={list(given)}"
                raise UserError(
                    f"{asked} is for a run of stage=piano_task; this one has learned the next token: it continues a "
                    "prompt, and has no parameters"
                )
            return None, ()
        by_name = {choice.task.name: choice for choice in self.choices}
        choice = by_name.get(name or "continuation", None if name else self.choices[0])
        if choice is None:
            what = "is not a task" if name not in TASKS else "is not among what this run has learned"
            raise UserError(f"sampling.task={name} {what}; it knows {', '.join(by_name)}")
        if given:
            return choice.task, choice.task.values_of(given)
        return choice.task, tuple((low + high) // 2 for low, high in choice.ranges)

    def _prefix(self) -> list[int]:
        from rung.recipes.piano.sequence import prefix_of

        composer = self._sampling["composer"]
        if composer and not self.cfg.data.prefix_tokens:
            raise UserError(
                f"sampling.composer={composer}: this run was trained without composers (data.prefix_tokens=false)"
            )
        return prefix_of(self.sets.trained_on, composer) if self.cfg.data.prefix_tokens else []

    def _held_out_prompts(self, num: int, task: Task | None) -> list[Prompt]:
        """Of the eval set, the same every time: one task after the other, or the one that was asked for."""
        from rung.recipes.piano.completion import prompt_of

        rows = next(iter(self.sets.evals.values()))
        asked = [n for n, choice in enumerate(self.choices) if choice.task is task]
        order = asked if self._sampling["task"] else list(range(len(self.choices)))
        num_stretches = rows.num_rows // len(self.choices)
        prompts = []
        for number in range(num):
            first, task_rows = number * num_stretches // num, order[number % len(order)] * num_stretches
            ids = task_rows + (first + np.arange(min(num_stretches, NUM_TRIED))) % num_stretches
            tokens = rows.gather(ids, Draw(0, -1, ids))["tokens"]
            prompts += [prompt for prompt in map(prompt_of, tokens) if prompt is not None][:1]  # others were cut
        if not prompts:
            raise UserError(
                f"data.context_size={self.cfg.data.context_size} holds no whole row of "
                f"data.notes_per_record={self.cfg.data.notes_per_record} notes; give sampling.prompt"
            )
        return prompts

    # Weights of others

    @classmethod
    def keys_of(cls, source: Path) -> Mapping[str, Any]:
        from rung.nn.adopt import keys_of

        return keys_of(source)

    def adopt(self, model: nn.Module, source: Path) -> str:
        from rung.recipes.piano.exported import adopt_weights

        return adopt_weights(cast("Transformer", model), self.tokenizer, source)

    def export_hf(self, model: nn.Module, folder: Path) -> Sequence[str]:
        from rung.recipes.piano.exported import export_hf

        return export_hf(cast("Transformer", model), self.tokenizer, folder)

    # Preparation

    @classmethod
    def prepare(
        cls, cfg: keys.Config, seed: int, source: Path | None, name: str | None, replace: bool, report: Report
    ) -> tuple[Path, str]:
        from rung.data.store import place
        from rung.recipes.piano.data import prepare

        name = name or cfg.dataset.base_dataset_name
        out = place(name)
        summary = prepare(
            source,
            out,
            pause_detection_threshold=cfg.dataset.pause_detection_threshold,
            sustain=bool(cfg.dataset.sustain),
            seed=seed,
            name=name,
            replace=replace,
            report=report,
        )
        return out, summary


NUM_TRIED = 64  # rows of the eval set that are looked at for one that is whole
SAMPLING = (
    "num_samples", "num_tokens", "temperature", "top_k", "top_p", "grammar", "prompt", "task", "parameters", "composer",
)  # fmt: skip
