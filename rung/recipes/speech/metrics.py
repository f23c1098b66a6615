"""Word error rate, on words as people read them: case and punctuation do not count, apostrophes do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rung.errors import UserError

_NO_WORD = re.compile(r"[^\w']+|_")


class WordErrors(NamedTuple):
    errors: int  # words exchanged, left out or added
    words: int  # of the references


def normalise(text: str) -> str:
    return " ".join(_NO_WORD.sub(" ", text.replace("\u2019", "'").casefold()).split())


def word_errors(references: Sequence[str], answers: Sequence[str]) -> WordErrors:
    try:
        import jiwer
    except ImportError:
        problem = "the word error rate needs jiwer, which is not installed"
        raise UserError(
            f"{problem}; pip install 'rung[speech]', or set evaluation.wer_rows=0", code="not-installed"
        ) from None
    errors = words = 0
    for reference, answer in zip(references, answers, strict=True):
        own, said = normalise(reference), normalise(answer)
        num_words = len(own.split())
        words += num_words
        if not own:  # jiwer counts one error whatever was said
            errors += len(said.split())
            continue
        found = jiwer.process_words(own, said)
        errors += found.substitutions + found.deletions + found.insertions
    return WordErrors(errors, words)
