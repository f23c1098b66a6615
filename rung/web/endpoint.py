"""A text model behind the API that programs know from OpenAI.

    GET  /v1/models             the runs that are played
    POST /v1/completions        a prompt is continued
    POST /v1/chat/completions   messages are answered, where the run's tokenizer has a chat template

What is asked for and cannot be done (a bias of single tokens, penalties, tools) is refused and not ignored; only names
of users and metadata, which change no answer, are. Beyond the API there is `top_k`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from rung import parse
from rung.errors import UserError
from rung.text import error_text
from rung.web.answers import BusyError, Played, Turns, body_of
from rung.web.serve import openai_error

T = TypeVar("T")

MOST_CHOICES = 16  # of all prompts of a request together
MOST_STOPS = 4
DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
DEFAULT_CHAT_TOKENS = 512  # there the whole context is the default, which no small model should fill

log = logging.getLogger(__name__)

Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request have. null is the same as nothing."""

    model: str
    max_tokens: Tokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Refused where they ask for something: see `unsupported`.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def unsupported(self) -> str | None:
        """The name of something that is asked for and cannot be had."""
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                return name
        return None


class CompletionAsked(Asked, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None  # text, ids of tokens, or a list of either
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def unsupported(self) -> str | None:
        for name in ("echo", "suffix"):
            if getattr(self, name):
                return name
        return "best_of" if (self.best_of or 1) > (self.n or 1) else super().unsupported()


class Part(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, str]:
        content = self.content or ""
        content = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatAsked(Asked, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None

    def unsupported(self) -> str | None:
        if (self.response_format or {"type": "text"}) != {"type": "text"}:
            return "response_format"
        return "tools" if self.tools else super().unsupported()


class RefusedError(Exception):
    """An error of the API: its status, and what its JSON says."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.answer = openai_error(message, status, code, param)


class Piece(NamedTuple):
    """Some of a choice: its text, as far as no stop string can begin in it, and the tokens that were drawn since."""

    text: str
    tokens: Sequence[dict[str, Any]] = ()
    finish: str | None = None


class Job(NamedTuple):
    """What is to be generated for one request."""

    id: str
    created: int
    one: Played
    prompts: Sequence[dict[str, Any]]  # the part of a player's request that says what to continue
    common: dict[str, Any]  # the rest of it
    num_choices: int  # of each prompt
    stops: Sequence[str]
    seed: int


class Usage:
    """Counts the tokens of a request while they are made."""

    def __init__(self) -> None:
        self.num_prompt = self.num_made = 0

    def to_dict(self) -> dict[str, int]:
        total = self.num_prompt + self.num_made
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_made, "total_tokens": total}


def endpoint_routes(played: Sequence[Played], turns: Turns) -> list[BaseRoute]:
    created = int(time.time())
    by_name = {one.name: one for one in played}

    def model_of(name: str) -> Played:
        if name not in by_name:
            raise RefusedError(
                f"The model `{name}` does not exist; there are {', '.join(by_name)}", 404, "model_not_found", "model"
            )
        return by_name[name]

    def to_dict(one: Played) -> dict[str, Any]:
        return {"id": one.name, "object": "model", "created": created, "owned_by": "rung"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [to_dict(one) for one in played]})

    async def model(request: Request) -> Response:
        return JSONResponse(to_dict(model_of(request.path_params["name"])))

    async def completions(request: Request) -> Response:
        turns.check_room()  # before a large body is read in vain
        asked = await read(request, CompletionAsked)
        one = model_of(asked.model)
        given = asked.prompt or ""
        kinds = {type(each) for each in given} if isinstance(given, list) else set()
        if len(kinds) > 1:
            raise RefusedError("prompt mixes text and ids; give a list of one kind", param="prompt")
        is_many = bool(kinds) and kinds != {int}
        prompts = [{"prompt": each} for each in (given if is_many else [given])]
        common = common_of(asked, one, "max_tokens", asked.max_tokens or DEFAULT_TOKENS, asked.logprobs)
        job = job_of("cmpl", asked, one, prompts, common)
        if not asked.stream:
            return await whole(request, job, "text_completion", lambda pieces: completion_choice(pieces, asked))

        def chunk(index: int, piece: Piece, offset: int) -> dict[str, Any]:
            logprobs = None if asked.logprobs is None else completion_logprobs(piece.tokens, asked.logprobs, offset)
            return {"text": piece.text, "index": index, "logprobs": logprobs, "finish_reason": piece.finish}

        return await streamed(request, asked, job, "text_completion", chunk)

    async def chat(request: Request) -> Response:
        turns.check_room()
        asked = await read(request, ChatAsked)
        one = model_of(asked.model)
        if not one.player.about()["has_chat"]:
            raise RefusedError(
                f"{one.name} has no chat template: it continues text; call /v1/completions", 400, "no_chat_template",
                "model",
            )  # fmt: skip
        if asked.top_logprobs is not None and not asked.logprobs:
            raise RefusedError("top_logprobs needs logprobs=true", param="top_logprobs")
        name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        num_tokens = getattr(asked, name) or DEFAULT_CHAT_TOKENS
        common = common_of(asked, one, name, num_tokens, (asked.top_logprobs or 0) if asked.logprobs else None)
        job = job_of("chatcmpl", asked, one, [{"messages": [each.to_dict() for each in asked.messages]}], common)

        def logprobs_of(tokens: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
            return {"content": [chat_logprobs(each) for each in tokens], "refusal": None} if asked.logprobs else None

        if not asked.stream:

            def choice(pieces: Sequence[Piece]) -> dict[str, Any]:
                message = {"role": "assistant", "content": "".join(one.text for one in pieces), "refusal": None}
                tokens = [token for one in pieces for token in one.tokens]
                return {"message": message, "logprobs": logprobs_of(tokens), "finish_reason": pieces[-1].finish}

            return await whole(request, job, "chat.completion", choice)
        begun: set[int] = set()

        def chunk(index: int, piece: Piece, offset: int) -> dict[str, Any]:
            delta = {} if index in begun else {"role": "assistant"}
            begun.add(index)
            if piece.text or delta:
                delta["content"] = piece.text
            logprobs = logprobs_of(piece.tokens) if piece.tokens else None
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish}

        return await streamed(request, asked, job, "chat.completion.chunk", chunk)

    async def unknown(request: Request) -> Response:
        return openai_error(f"Unknown request URL: {request.method} {request.url.path}", 404, "unknown_url")

    async def whole(
        request: Request, job: Job, kind: str, choice_of: Callable[[Sequence[Piece]], dict[str, Any]]
    ) -> Response:
        usage = Usage()

        async def make() -> list[dict[str, Any]]:
            choices: list[list[Piece]] = [[] for _ in range(len(job.prompts) * job.num_choices)]
            async for index, piece in generated(turns, job, usage):
                choices[index].append(piece)
            return [{"index": index, **choice_of(pieces)} for index, pieces in enumerate(choices)]

        choices = await unless_gone(request, make())
        if choices is None:
            return Response(status_code=499)  # to nobody
        said = {"id": job.id, "object": kind, "created": job.created, "model": job.one.name, "choices": choices}
        return JSONResponse({**said, "usage": usage.to_dict(), "system_fingerprint": None})

    async def streamed(
        request: Request, asked: Asked, job: Job, kind: str, choice_of: Callable[[int, Piece, int], dict[str, Any]]
    ) -> Response:
        usage = Usage()
        pieces = generated(turns, job, usage)
        # An error before the first piece still has a status of its own.
        first = await unless_gone(request, anext(pieces))
        if first is None:
            return Response(status_code=499)
        has_usage = asked.stream_options is not None and asked.stream_options.include_usage
        head = {"id": job.id, "object": kind, "created": job.created, "model": job.one.name, "system_fingerprint": None}

        async def events() -> AsyncIterator[bytes]:
            offsets = [0] * (len(job.prompts) * job.num_choices)
            unset = {"usage": None} if has_usage else {}
            try:
                async with contextlib.aclosing(pieces):
                    index, piece = first
                    while True:
                        yield event({**head, "choices": [choice_of(index, piece, offsets[index])], **unset})
                        offsets[index] += sum(len(token["text"]) for token in piece.tokens)
                        try:
                            index, piece = await anext(pieces)
                        except StopAsyncIteration:
                            break
                if has_usage:
                    yield event({**head, "choices": [], "usage": usage.to_dict()})
                yield b"data: [DONE]\n\n"
            except Exception as error:  # the status is sent already
                yield b"data: " + bytes(failure(error).body) + b"\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    def answered(call: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await call(request)
            except ClientDisconnect:
                return Response(status_code=499)  # to nobody
            except Exception as error:
                return failure(error)

        return answer

    return [
        Route("/v1/models", answered(models), methods=["GET"]),
        Route("/v1/models/{name:path}", answered(model), methods=["GET"]),
        Route("/v1/completions", answered(completions), methods=["POST"]),
        Route("/v1/chat/completions", answered(chat), methods=["POST"]),
        Route("/v1/{rest:path}", unknown, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
    ]


def failure(error: Exception) -> JSONResponse:
    if isinstance(error, RefusedError):
        return error.answer
    if isinstance(error, BusyError):
        return openai_error(str(error), 429, "rate_limit_exceeded")
    if isinstance(error, UserError):
        code = "context_length_exceeded" if error.code == "too-long" else error.code
        return openai_error(str(error), 413 if error.code == "too-large" else 400, code)
    log.error("the model failed", exc_info=error)
    return openai_error(f"the model failed: {error_text(error)}", 500, "model_failed")


async def read(request: Request, kind: type[T]) -> T:
    body = await body_of(request)
    try:
        asked = parse.typed_json(body, kind)
    except parse.ParseError as error:
        text = str(error)
        _, _, path = text.partition("`$.")  # msgspec says where, as in: ... - at `$.temperature`
        raise RefusedError(f"the request is not valid: {text}", param=path.partition("`")[0] or None) from error
    assert isinstance(asked, Asked)
    if name := asked.unsupported():
        raise RefusedError(f"{name} is not supported; leave it out", code="unsupported_parameter", param=name)
    if asked.stream_options is not None and not asked.stream:
        raise RefusedError("stream_options needs stream=true", param="stream_options")
    return asked


def common_of(asked: Asked, one: Played, name: str, num_tokens: int, num_alternatives: int | None) -> dict[str, Any]:
    """`name` is what the request calls `num_tokens`."""
    most = one.player.about()["most_tokens"]
    if num_tokens > most:
        raise RefusedError(f"{name}={num_tokens} is above {most}, the limit", param=name)
    return {
        "num_tokens": num_tokens,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_k": asked.top_k or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "alternatives": num_alternatives or 0,
        "must_fit": True,
    }


def job_of(
    kind: str, asked: Asked, one: Played, prompts: Sequence[dict[str, Any]], common: dict[str, Any]
) -> Job:  # fmt: skip
    num = asked.n or 1
    if not 1 <= len(prompts) * num <= MOST_CHOICES:
        raise RefusedError(
            f"{len(prompts)} prompts, {num} choices each; together there can be 1 to {MOST_CHOICES}", param="prompt"
        )
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if not all(stops):
        raise RefusedError("a stop string must not be empty", param="stop")
    seed = secrets.randbelow(2**62) if asked.seed is None else asked.seed % 2**63
    return Job(f"{kind}-{secrets.token_hex(12)}", int(time.time()), one, prompts, common, num, stops, seed)


async def generated(turns: Turns, job: Job, usage: Usage) -> AsyncGenerator[tuple[int, Piece], None]:
    """(choice, piece) of one choice after the other."""
    player = job.one.player
    with turns.in_line():
        if len(job.prompts) > 1:  # one that is refused should not be found after others were answered
            for prompt in job.prompts:
                asked = msgspec.convert({**job.common, **prompt}, player.Request)
                async with contextlib.aclosing(turns.pieces(player, asked)) as pieces:
                    await anext(pieces)
        for index in range(len(job.prompts) * job.num_choices):
            number, choice = divmod(index, job.num_choices)
            request = {**job.common, **job.prompts[number], "seed": job.seed, "choice": index}
            asked = msgspec.convert(request, player.Request)
            held = ""
            tokens: list[dict[str, Any]] = []
            async with contextlib.aclosing(turns.pieces(player, asked)) as pieces:
                async for one in pieces:
                    if "prompt_tokens" in one:
                        usage.num_prompt += one["prompt_tokens"] if choice == 0 else 0
                        continue
                    if "finish" in one:
                        yield index, Piece(held + one["text"], tokens, one["finish"])
                        break
                    usage.num_made += 1
                    tokens.append(one)
                    held += one["text"]
                    found = [place for stop in job.stops if (place := held.find(stop)) >= 0]
                    if found:
                        yield index, Piece(held[: min(found)], tokens, "stop")
                        break
                    # What may be the beginning of a stop string is held back until it is known.
                    cut = len(held) - max((overlap(held, stop) for stop in job.stops), default=0)
                    if cut:
                        yield index, Piece(held[:cut], tokens)
                        held, tokens = held[cut:], []


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins a stop string."""
    return next((num for num in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:num])), 0)


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """The outcome of some work, or None where the client has gone, which ends it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        doing.cancel()
        leaving.cancel()


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def completion_choice(pieces: Sequence[Piece], asked: CompletionAsked) -> dict[str, Any]:
    tokens = [token for one in pieces for token in one.tokens]
    logprobs = None if asked.logprobs is None else completion_logprobs(tokens, asked.logprobs, 0)
    return {"text": "".join(one.text for one in pieces), "logprobs": logprobs, "finish_reason": pieces[-1].finish}


def completion_logprobs(tokens: Sequence[dict[str, Any]], num: int, offset: int) -> dict[str, Any]:
    """`offset` counts the characters before these tokens in the completion."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token["text"])
    tops = [{name: finite(value) for _, name, value, _ in token["alternatives"]} for token in tokens]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [finite(token["logprob"]) for token in tokens],
        "top_logprobs": tops if num else None,
        "text_offset": offsets,
    }


def chat_logprobs(token: dict[str, Any]) -> dict[str, Any]:
    tops = [
        {"token": name, "logprob": finite(value), "bytes": content} for _, name, value, content in token["alternatives"]
    ]
    own = {"token": token["token"], "logprob": finite(token["logprob"]), "bytes": token["bytes"]}
    return {**own, "top_logprobs": tops}


def finite(logprob: float) -> float:
    """As OpenAI writes what is beyond its numbers."""
    return logprob if math.isfinite(logprob) else -9999.0
