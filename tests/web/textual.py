"""A text model with random weights behind a real server, for the tests of its page and its endpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from rung.data.tokenizer import Bytes, Subwords, Tokenizer, learn
from rung.nn.shape import Shape
from rung.nn.transformer import Transformer
from rung.recipes.text.config import Sampling
from rung.recipes.text.player import TextPlayer
from rung.web.answers import Played
from rung.web.play import play_app
from rung.web.serve import address_of, listen, server

CONTEXT = 64
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def chatty() -> Tokenizer:
    """Subwords with a chat template, as in a Hugging Face folder."""
    learned = learn("bpe", ["the cat sat on the mat, said the user to the assistant"] * 3, 280)
    about = json.loads(learned.files["tokenizer.json"])
    for number, name in enumerate(("<|im_start|>", "<|im_end|>"), learned.vocab_size):
        about["added_tokens"].append(
            {"id": number, "content": name, "special": True, "normalized": False, "single_word": False,
             "lstrip": False, "rstrip": False}
        )  # fmt: skip
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT}
    return Subwords(
        "hf", {"tokenizer.json": json.dumps(about).encode(), "tokenizer_config.json": json.dumps(config).encode()}
    )


def player(tokenizer: Tokenizer | None = None, seed: int = 0, end_bias: float = 0.0) -> TextPlayer:
    """`end_bias` makes the end of a text as likely as a test needs it."""
    tokenizer = tokenizer or Bytes()
    shape = Shape(tokenizer.vocab_size, CONTEXT, 1, 2, 16)
    model = Transformer(shape, seed).eval()
    if end_bias:
        logits_of = model.logits

        def logits(x: torch.Tensor) -> torch.Tensor:
            found = logits_of(x).clone()
            found[..., tokenizer.end] += end_bias
            return found

        model.logits = logits
    return TextPlayer(model, tokenizer, Sampling(num_tokens=24), ["the first example", "another\none"])


class ServedText:
    def __init__(self, players: Mapping[str, Any], token: str | None = None) -> None:
        played = [Played(one, name, f"{name} at step 7") for name, one in players.items()]
        self.app = play_app(played, token=token, mode=torch.no_grad)
        listening = listen("127.0.0.1", 0)
        self.url = address_of(listening)
        self.port: int = listening.getsockname()[1]
        self.server = server(self.app)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def texts(pieces: Sequence[dict[str, Any]]) -> str:
    return "".join(piece.get("text", "") for piece in pieces)
