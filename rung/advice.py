"""What findings, checks and errors tell a reader to type, and how it is put to somebody whose loop is their own.

A command in a sentence stands in backticks; a field that is a command has nothing else in it. Each is one that can be
typed as it stands, but for what only the reader knows, which is written in capitals (FILE:FUNCTION).
"""

from __future__ import annotations

import re

_QUOTED = re.compile(r"`(rung [^`]+)`")
_KEY = re.compile(r"\b(lr|optimizer|system|data|guard|adversarial|signals|checkpoint)\.([a-z_0-9]+)(=(\S*[\w%]))?")
# What a key of a recipe is called in a loop of somebody's own.
_WORDS = {
    "lr.learning_rate": "the learning rate", "lr.warmup_iters": "the steps of the warm-up", "optimizer.eps": "eps",
    "optimizer.beta2": "beta2", "optimizer.grad_clip": "the limit of the norm", "optimizer.max_iters": "the steps",
    "optimizer.weight_decay": "the weight decay", "system.data_workers": "the workers of the data loader",
    "optimizer.gradient_accumulation_steps": "the steps of accumulation", "system.dtype": "the type of autocast",
    "system.deterministic": "torch.use_deterministic_algorithms", "system.compile": "torch.compile",
    "data.batch_size": "the batch size",
}  # fmt: skip


def commands(text: str) -> list[str]:
    """The commands in a sentence, or the one that a field is; a bare name of a verb is none."""
    found = [text] if text.startswith("rung ") and "`" not in text else _QUOTED.findall(text)
    return [command for command in found if len(command.split()) > 2]


def in_own_words(text: str) -> str:
    """A sentence in which keys of a recipe are said as the author of a script would; commands stay as they are."""

    def word(match: re.Match[str]) -> str:
        name, value = f"{match[1]}.{match[2]}", match[4]
        said = _WORDS.get(name, f"the {match[2].replace('_', ' ')}")
        return f"{said} = {value}" if value else said

    return "".join(part if part.startswith("`") else _KEY.sub(word, part) for part in re.split(r"(`[^`]*`)", text))


def located(text: str, run_id: str, ref: str) -> str:
    """The same, with the run named so that the commands find it from here."""
    if not run_id or run_id == ref:
        return text
    for command in commands(text):
        text = text.replace(command, re.sub(rf"(?<![\w/]){re.escape(run_id)}(?![\w/])", ref, command))
    return text
