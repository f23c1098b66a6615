"""Chat templates: messages to ids, as the tokenizer of others says.

A template is a program in Jinja that came with a tokenizer. It runs in Jinja's sandbox, with no way to files or to
Python. Only what the template itself writes can become a special token; a message that quotes <|im_end|> is encoded as
its characters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rung import parse
from rung.data.tokenizer import Subwords, Tokenizer
from rung.errors import UserError
from rung.text import one_line

ROLES = ("system", "user", "assistant")


class ChatTemplate:
    def __init__(self, text: str, names: Mapping[str, str], tokenizer: Subwords) -> None:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(problem: str) -> None:
            raise UserError(f"the chat template says: {one_line(problem)}", code="bad-messages")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: ""  # an answer must not depend on the day
        try:
            self.template = environment.from_string(text)
        except TemplateError as error:
            raise UserError(
                f"the tokenizer's chat template cannot be read: {one_line(error)}", code="tokenizer-damaged"
            ) from error
        self.names, self.tokenizer = dict(names), tokenizer

    @staticmethod
    def of(tokenizer: Tokenizer) -> ChatTemplate | None:
        """The one that came with a tokenizer; None where there is none, or jinja2 is not installed."""
        if not isinstance(tokenizer, Subwords):
            return None
        files, text = tokenizer.files, None
        about: Any = {}
        if "tokenizer_config.json" in files:
            about = parse.mapping(parse.loose_json(files["tokenizer_config.json"]))
            text = about.get("chat_template")
            if isinstance(text, list):  # several, by name
                named = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
                text = named.get("default")
        if "chat_template.jinja" in files:
            text = parse.text(files["chat_template.jinja"])
        if not isinstance(text, str) or not text:
            return None
        names = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = about.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            names[name] = value if isinstance(value, str) else ""
        try:
            return ChatTemplate(text, names, tokenizer)
        except ModuleNotFoundError:
            return None

    def encode(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """The ids of a conversation, up to where the answer begins."""
        for message in messages:
            # The template writes these, so anything else in them could become a special token.
            if set(message) != {"role", "content"} or message["role"] not in ROLES:
                raise UserError(
                    f"a message has a role ({', '.join(ROLES)}) and a content, and nothing else", code="bad-messages"
                )
        plain = self.tokenizer.encode_markup(self._render(messages))
        # Each content goes in once more as a name that nobody can know, and comes out as text.
        secret = secrets.token_hex(16)
        marked = [{**message, "content": f"content-{secret}-{n}-"} for n, message in enumerate(messages)]
        parts = re.split(rf"content-{secret}-(\d+)-", self._render(marked))
        pieces = [self.tokenizer.encode_markup(parts[0])]
        for number, markup in zip(parts[1::2], parts[2::2]):
            pieces += [self.tokenizer.encode(messages[int(number)]["content"]), self.tokenizer.encode_markup(markup)]
        careful = np.concatenate(pieces)
        # Filters of the template see the contents only where it is rendered plainly, and some tokenizers encode a text
        # otherwise than its parts. So that one is taken, unless a content has brought a special token into it.
        special = np.array(sorted(self.tokenizer.special_ids))
        is_same = np.array_equal(plain[np.isin(plain, special)], careful[np.isin(careful, special)])
        return (plain if is_same else careful).astype(np.int64)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return self.template.render(messages=messages, add_generation_prompt=True, tools=None, **self.names)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise UserError(
                f"the chat template refuses these messages: {one_line(error)}", code="bad-messages"
            ) from error
