"""A language model that continues a text, token by token, for `rung play` and its endpoint.

Probabilities are the model's own: of all tokens, before temperature, top_k and top_p.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from rung.data.chat import ChatTemplate
from rung.data.tokenizer import LOST, Tokenizer
from rung.errors import UserError
from rung.nn.generate import generate_steps
from rung.nn.pack import packed
from rung.nn.transformer import Transformer
from rung.random import Draw
from rung.recipes.text.config import Sampling

MOST_TOKENS = 4096  # of one answer
MOST_PROMPT = 1_000_000  # characters or ids, so that nobody waits long while somebody's prompt is encoded
MOST_ALTERNATIVES = 20
MOST_PENDING = 16  # tokens without a whole character, after which they are shown as they are


class TextRequest(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] = ""  # text, or the ids of tokens
    then: list[int] = []  # ids that follow the prompt, as they were answered before
    messages: list[dict[str, str]] | None = None  # in place of a prompt, for the chat template: role and content
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] = 64
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0 = all
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    choice: Annotated[int, msgspec.Meta(ge=0, lt=1000)] = 0  # of several with one seed
    alternatives: Annotated[int, msgspec.Meta(ge=0, le=MOST_ALTERNATIVES)] = 0
    must_fit: bool = False  # refuse a prompt that the model cannot see whole


class TextPlayer:
    kind = "text"
    Request = TextRequest

    def __init__(self, model: Transformer, tokenizer: Tokenizer, sampling: Sampling, examples: Sequence[str]) -> None:
        self.model = packed(model, 1, MOST_TOKENS)  # once, for all answers
        self.tokenizer, self.sampling, self.examples = tokenizer, sampling, list(examples)
        self.chat = ChatTemplate.of(tokenizer)
        device = model.norm.weight.device
        # The rest of a table that is padded for speed means nothing.
        self.is_id = torch.arange(model.shape.vocab_size, device=device) < tokenizer.vocab_size

    def about(self) -> dict[str, Any]:
        usual = self.sampling
        return {
            "context_size": self.model.shape.context_size,
            "vocab_size": self.tokenizer.vocab_size,
            "most_tokens": MOST_TOKENS,
            "has_chat": self.chat is not None,
            "has_end": self.tokenizer.end is not None,
            "examples": self.examples,
            "usual": {
                "temperature": usual.temperature, "top_k": usual.top_k, "top_p": usual.top_p,
                "num_tokens": min(usual.num_tokens, MOST_TOKENS),
            },
        }  # fmt: skip

    def answer(self, request: TextRequest) -> Iterator[dict[str, Any]]:
        """First {prompt_tokens, seen_tokens}, then a piece for each token, last {text, finish}.

        A token's `text` is what it adds to the text, which may be nothing while a character is incomplete; `token` is
        what one calls it, and `bytes` what it is made of, where that is known. The last text is what was still
        incomplete.
        """
        ids, limit = self._prompt(request), self.model.shape.context_size
        if request.must_fit and len(ids) > limit:
            raise UserError(f"the prompt has {len(ids)} tokens; the model sees {limit}", code="too-long")
        yield {"prompt_tokens": len(ids), "seen_tokens": min(len(ids), limit)}
        device = self.model.norm.weight.device
        steps = generate_steps(
            self.model,
            torch.from_numpy(ids.astype(np.int64))[None].to(device),
            request.num_tokens,
            temperature=request.temperature,
            top_k=request.top_k or None,
            top_p=request.top_p if request.top_p < 1 else None,
            generator=Draw(request.seed, -1, np.array([request.choice])).generator("play", device),
            stop_id=self.tokenizer.end,
            allowed=None if bool(self.is_id.all()) else lambda ids: self.is_id,
        )
        text, finish = Growing(self.tokenizer, ids), "length"
        for step in steps:
            chosen, logprobs = int(step.ids_B[0]), step.logits_BV[0].log_softmax(dim=-1)
            if chosen == self.tokenizer.end:
                finish = "stop"
                break
            best = logprobs.topk(min(request.alternatives, len(logprobs), self.tokenizer.vocab_size))
            yield {
                "id": chosen,
                "token": self.tokenizer.name(chosen),
                "bytes": self._bytes(chosen),
                "text": text.add(chosen),
                "logprob": float(logprobs[chosen]),
                "alternatives": [
                    (id, self.tokenizer.name(id), value, self._bytes(id))
                    for id, value in zip(best.indices.tolist(), best.values.tolist())
                ],
            }
        yield {"text": text.rest(), "finish": finish}

    def _bytes(self, id: int) -> list[int] | None:
        found = self.tokenizer.bytes_of(id)
        return None if found is None else list(found)

    def _prompt(self, request: TextRequest) -> np.ndarray:
        size = len(request.prompt) + len(request.then)
        size += sum(len(value) for message in request.messages or () for value in message.values())
        if size > MOST_PROMPT:
            raise UserError(f"the prompt has {size} characters or tokens; the limit is {MOST_PROMPT}", code="too-long")
        if request.messages is not None:
            if self.chat is None:
                raise UserError("the tokenizer of this run has no chat template; give a prompt", code="not-supported")
            return self.chat.encode(request.messages)
        given = request.prompt if isinstance(request.prompt, list) else self.tokenizer.encode(request.prompt).tolist()
        ids = np.array([*given, *request.then], object)  # of any size, until they are looked at
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.tokenizer.vocab_size):
            raise UserError(f"token ids go from 0 to {self.tokenizer.vocab_size - 1}", code="bad-value")
        if len(ids):
            return ids.astype(np.int64)
        if self.tokenizer.end is None:
            raise UserError("the prompt is empty; give at least one character", code="prompt-empty")
        return np.array([self.tokenizer.end])  # what comes after a document is the beginning of another


class Growing:
    """A text that grows by tokens. A character that needs several of them is added with the last one."""

    def __init__(self, tokenizer: Tokenizer, ids: np.ndarray) -> None:
        self.tokenizer = tokenizer
        # Some tokenizers write a token otherwise at the beginning of a text, so the last ones are decoded together.
        self.ids = ids[-4:].tolist()
        self.num_shown = len(self.ids)
        self.start = 0
        while self.num_shown and self.tokenizer.decode(self.ids[: self.num_shown]).endswith(LOST):
            self.num_shown -= 1  # the prompt ends inside a character, which comes whole with the answer

    def add(self, id: int) -> str:
        self.ids.append(id)
        added = self._added()
        if added.endswith(LOST) and len(self.ids) - self.num_shown < MOST_PENDING:
            return ""
        self.start, self.num_shown = self.num_shown, len(self.ids)
        return added

    def rest(self) -> str:
        return self._added() if self.num_shown < len(self.ids) else ""

    def _added(self) -> str:
        before = self.tokenizer.decode(self.ids[self.start : self.num_shown])
        return self.tokenizer.decode(self.ids[self.start :])[len(before) :]
