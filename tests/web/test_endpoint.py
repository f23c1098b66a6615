"""If this fails, a program that calls a run as it calls OpenAI gets another answer, or none, or no reason why."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from rung.web import answers
from rung.web.serve import ImpatientProtocol
from tests.web.textual import CONTEXT, ServedText, chatty, player

openai = pytest.importorskip("openai")
TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="module")
def served() -> Iterator[ServedText]:
    made = ServedText(
        {"text/3": player(), "text/2": player(seed=1), "chat/1": player(chatty()), "ends/1": player(end_bias=50)}
    )
    yield made
    made.stop()


@pytest.fixture(scope="module")
def client(served: ServedText) -> Any:
    return openai.OpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0)


class Answer(NamedTuple):
    status: int
    data: Any
    kind: str


def call(served: ServedText, path: str, body: Any = None, method: str = "POST", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    text = body if isinstance(body, bytes) else json.dumps(body)
    connection.request(
        method, path, text if method == "POST" else None, {"Content-Type": "application/json", **headers}
    )
    answer = connection.getresponse()
    raw, kind = answer.read(), str(answer.getheader("content-type"))
    return Answer(answer.status, json.loads(raw) if kind == "application/json" else raw.decode(), kind)


def complete(served: ServedText, prompt: Any = "The", model: str = "text/3", **more: Any) -> Any:
    answer = call(served, "/v1/completions", {"model": model, "prompt": prompt, **more})
    assert answer.status == 200, answer.data
    return answer.data


def events(served: ServedText, path: str, body: Any) -> list[Any]:
    answer = call(served, path, {**body, "stream": True})
    assert (answer.status, answer.kind.partition(";")[0]) == (200, "text/event-stream")
    lines = answer.data.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_the_models_are_listed(served: ServedText, client: Any) -> None:
    listed = call(served, "/v1/models", method="GET").data
    assert listed["object"] == "list"
    assert [one["id"] for one in listed["data"]] == ["text/3", "text/2", "chat/1", "ends/1"]
    for one in listed["data"]:
        assert set(one) == {"id", "object", "created", "owned_by"}
        assert (one["object"], type(one["created"]), one["owned_by"]) == ("model", int, "rung")
    assert [one.id for one in client.models.list()] == ["text/3", "text/2", "chat/1", "ends/1"]
    assert client.models.retrieve("text/2").id == "text/2"


def test_every_field_of_a_completion(served: ServedText) -> None:
    made = complete(served, max_tokens=8, seed=1, n=2, logprobs=3)
    assert set(made) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert made["id"].startswith("cmpl-")
    assert (made["object"], made["model"], type(made["created"])) == ("text_completion", "text/3", int)
    assert made["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert [choice["index"] for choice in made["choices"]] == [0, 1]
    assert made["choices"][0]["text"] != made["choices"][1]["text"]
    for choice in made["choices"]:
        assert set(choice) == {"text", "index", "logprobs", "finish_reason"}
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]
        assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert [len(logprobs[name]) for name in logprobs] == [8] * 4
        assert all(-30 < value < 0 for value in logprobs["token_logprobs"])
        assert [len(top) for top in logprobs["top_logprobs"]] == [3] * 8
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert sum(math.exp(value) for value in logprobs["top_logprobs"][0].values()) < 1


def test_the_real_client_completes(served: ServedText, client: Any) -> None:
    expected = complete(served, max_tokens=12, seed=5, temperature=0.8, top_p=0.9)["choices"][0]["text"]
    made = client.completions.create(model="text/3", prompt="The", max_tokens=12, seed=5, temperature=0.8, top_p=0.9)
    assert made.choices[0].text == expected
    assert made.usage.completion_tokens == 12
    stream = client.completions.create(
        model="text/3", prompt="The", max_tokens=12, seed=5, temperature=0.8, top_p=0.9, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    parts = list(stream)
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected
    assert parts[-1].usage.total_tokens == 15
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"
    greedy = client.completions.create(
        model="text/3", prompt="The", max_tokens=5, temperature=0, extra_body={"top_k": 1}
    )
    assert greedy.choices[0].text == complete(served, max_tokens=5, temperature=0)["choices"][0]["text"]


def test_the_example_of_the_guide_works(served: ServedText, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/play.md").read_text("utf-8")
    code = guide.partition("```python\n")[2].partition("```")[0]
    assert "http://127.0.0.1:8000/" in code
    exec(code.replace("http://127.0.0.1:8000/", served.url), {})
    assert len(capsys.readouterr().out) > 40


def test_the_real_client_chats(served: ServedText, client: Any) -> None:
    messages = [{"role": "system", "content": "be the cat"}, {"role": "user", "content": "the mat"}]
    made = client.chat.completions.create(model="chat/1", messages=messages, max_completion_tokens=10, seed=2)
    assert made.choices[0].message.role == "assistant"
    parts = list(client.chat.completions.create(model="chat/1", messages=messages, max_tokens=10, seed=2, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == made.choices[0].message.content
    parts_of_text = [{"type": "text", "text": "the "}, {"type": "text", "text": "mat"}]
    again = client.chat.completions.create(
        model="chat/1", messages=[messages[0], {"role": "user", "content": parts_of_text}], max_tokens=10, seed=2
    )
    assert again.choices[0].message.content == made.choices[0].message.content


def test_every_field_of_a_chat(served: ServedText) -> None:
    body = {"model": "chat/1", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5, "seed": 1}
    made = call(served, "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2}).data
    assert set(made) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert (made["id"][:9], made["object"]) == ("chatcmpl-", "chat.completion")
    (choice,) = made["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert set(choice["message"]) == {"role", "content", "refusal"}
    assert (choice["message"]["role"], choice["message"]["refusal"], choice["finish_reason"]) == (
        "assistant",
        None,
        "length",
    )
    assert len(choice["logprobs"]["content"]) == made["usage"]["completion_tokens"] == 5
    for token in choice["logprobs"]["content"]:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(token["bytes"]).decode("utf-8", "replace") in (token["token"], "\ufffd")  # of half a character
        assert [set(top) for top in token["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
    parts = events(served, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]][-1] == "length"
    assert (parts[-1]["choices"], parts[-1]["usage"]) == ([], made["usage"])


def test_a_run_without_a_template_does_not_chat(served: ServedText, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="text/3", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "no_chat_template"


def test_pieces_of_a_stream_make_the_whole(served: ServedText) -> None:
    body = {"model": "text/3", "prompt": ["ab", "cd"], "max_tokens": 6, "seed": 1, "n": 2, "logprobs": 1}
    whole = complete(served, ["ab", "cd"], max_tokens=6, seed=1, n=2, logprobs=1)
    found: dict[int, dict[str, Any]] = {}
    for part in events(served, "/v1/completions", body):
        (choice,) = part["choices"]
        assert set(choice) == {"text", "index", "logprobs", "finish_reason"}
        mine = found.setdefault(choice["index"], {"text": "", "tokens": [], "offsets": [], "finish": []})
        mine["text"] += choice["text"]
        mine["tokens"] += choice["logprobs"]["tokens"]
        mine["offsets"] += choice["logprobs"]["text_offset"]
        mine["finish"].append(choice["finish_reason"])
    assert sorted(found) == [0, 1, 2, 3]
    for choice in whole["choices"]:
        mine = found[choice["index"]]
        assert mine["text"] == choice["text"]
        assert mine["tokens"] == choice["logprobs"]["tokens"]
        assert mine["offsets"] == choice["logprobs"]["text_offset"]
        assert mine["finish"][-1] == choice["finish_reason"]
        assert set(mine["finish"][:-1]) <= {None}


def test_a_text_ends_where_the_model_ends_it_or_at_a_stop_string(served: ServedText) -> None:
    ended = complete(served, model="ends/1")
    assert ended["choices"][0] == {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert ended["usage"]["completion_tokens"] == 0
    text = complete(served, max_tokens=24, seed=9)["choices"][0]["text"]
    stop = text[9:12]
    made = complete(served, max_tokens=24, seed=9, stop=["never comes", stop])
    assert made["choices"][0]["text"] == text[: text.index(stop)]
    assert made["choices"][0]["finish_reason"] == "stop"
    assert made["usage"]["completion_tokens"] < 24
    body = {"model": "text/3", "prompt": "The", "max_tokens": 24, "seed": 9, "stop": stop}
    streamed = "".join(part["choices"][0]["text"] for part in events(served, "/v1/completions", body))
    assert streamed == text[: text.index(stop)]  # nothing of the stop string was sent ahead
    half = complete(served, max_tokens=24, seed=9, stop=text[-2:] + "never")  # begins at the end, and is no stop
    assert half["choices"][0]["text"] == text


def test_ids_are_prompts_too(served: ServedText) -> None:
    as_text, as_ids = complete(served, "The", seed=1), complete(served, list(b"The"), seed=1)
    assert as_ids["choices"][0]["text"] == as_text["choices"][0]["text"]
    assert len(complete(served, [list(b"The"), list(b"A")], seed=1)["choices"]) == 2


REFUSED: list[tuple[str, Any, int, str | None, str | None]] = [
    ("completions", b"{", 400, None, None),
    ("completions", [], 400, None, None),
    ("completions", {"prompt": "a"}, 400, None, None),
    ("completions", {"model": "text/9", "prompt": "a"}, 404, "model_not_found", "model"),
    ("completions", {"model": "text/3", "prompt": "a", "temperature": 3}, 400, None, "temperature"),
    ("completions", {"model": "text/3", "prompt": "a", "top_p": 0}, 400, None, "top_p"),
    ("completions", {"model": "text/3", "prompt": "a", "max_tokens": 0}, 400, None, "max_tokens"),
    ("completions", {"model": "text/3", "prompt": "a", "max_tokens": 10**9}, 400, None, "max_tokens"),
    ("completions", {"model": "text/3", "prompt": "a", "n": 99}, 400, None, "n"),
    ("completions", {"model": "text/3", "prompt": ["a"] * 9, "n": 9}, 400, None, "prompt"),
    ("completions", {"model": "text/3", "prompt": ["a", 1]}, 400, None, "prompt"),
    ("completions", {"model": "text/3", "prompt": [999]}, 400, "bad-value", None),
    ("completions", {"model": "text/3", "prompt": "a" * (CONTEXT + 1)}, 400, "context_length_exceeded", None),
    ("completions", {"model": "text/3", "prompt": "a", "stop": [""]}, 400, None, "stop"),
    ("completions", {"model": "text/3", "prompt": "a", "echo": True}, 400, "unsupported_parameter", "echo"),
    ("completions", {"model": "text/3", "prompt": "a", "best_of": 3}, 400, "unsupported_parameter", "best_of"),
    ("completions", {"model": "text/3", "prompt": "a", "logit_bias": {"5": 1}}, 400, "unsupported_parameter",
     "logit_bias"),
    ("completions", {"model": "text/3", "prompt": "a", "frequency_penalty": 1}, 400, "unsupported_parameter",
     "frequency_penalty"),
    ("completions", {"model": "text/3", "prompt": "a", "stream_options": {}}, 400, None, "stream_options"),
    ("completions", {"model": "text/3", "prompt": "a", "temprature": 1}, 400, None, None),
    ("completions", {"model": "text/3", "prompt": "a" * 2_000_000}, 400, "context_length_exceeded", None),
    ("chat/completions", {"model": "chat/1", "messages": []}, 400, None, "messages"),
    ("chat/completions", {"model": "chat/1", "messages": [{"role": "user", "content": "a"}],
     "max_completion_tokens": 10**9}, 400, None, "max_completion_tokens"),
    ("chat/completions", {"model": "chat/1", "messages": [{"role": "robot", "content": "a"}]}, 400, None,
     "messages[0].role"),
    ("chat/completions", {"model": "chat/1", "messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400,
     "unsupported_parameter", "tools"),
    ("chat/completions", {"model": "chat/1", "messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, 400,
     None, "top_logprobs"),
]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body", "status", "code", "param"), REFUSED)
def test_what_cannot_be_done_is_refused_in_the_shape_of_the_api(
    served: ServedText, path: str, body: Any, status: int, code: str | None, param: str | None, is_stream: bool
) -> None:
    if is_stream and (not isinstance(body, dict) or "stream_options" in body):
        return
    answer = call(served, f"/v1/{path}", {**body, "stream": True} if is_stream else body)
    assert answer.status == status
    error = answer.data["error"]
    assert set(answer.data) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
    assert error["message"]


def test_other_addresses_and_methods_are_answered_in_its_shape_too(served: ServedText, client: Any) -> None:
    assert call(served, "/v1/embeddings", {}).data["error"]["code"] == "unknown_url"
    assert call(served, "/v1/completions", method="GET").status == 404
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text/3", input="a")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="text/9", prompt="a")


def test_a_request_that_is_too_large_is_not_read(served: ServedText, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_REQUEST_BYTES", 1000)
    answer = call(served, "/v1/completions", {"model": "text/3", "prompt": "a" * 2000})
    assert (answer.status, answer.data["error"]["code"]) == (413, "too-large")


def test_with_a_token_only_who_gives_it_is_answered() -> None:
    served = ServedText({"text/3": player()}, token=TOKEN)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Basic x"}):
        for path, method in (("/v1/models", "GET"), ("/v1/completions", "POST"), ("/v1/nothing", "GET")):
            answer = call(served, path, {"model": "text/3"}, method, **headers)
            assert answer.status == 401
            assert answer.data["error"]["code"] == "invalid_api_key"
    good = openai.OpenAI(base_url=f"{served.url}v1", api_key=TOKEN, max_retries=0)
    assert good.completions.create(model="text/3", prompt="a", max_tokens=2).usage.completion_tokens == 2
    bad = openai.OpenAI(base_url=f"{served.url}v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        bad.models.list()
    assert call(served, "/v1/models", method="GET", Host="evil.example", Authorization=f"Bearer {TOKEN}").status == 403
    served.stop()


def test_null_is_the_same_as_nothing(served: ServedText) -> None:
    body = {"model": "text/3", "seed": 1, "max_tokens": 3, "stream": True}
    nothing = {"prompt": None, "stream_options": {"include_usage": None, "include_obfuscation": None}}
    parts = [events(served, "/v1/completions", one) for one in (body, {**body, **nothing})]
    texts_of = [["".join(choice["text"] for choice in part["choices"]) for part in each] for each in parts]
    assert texts_of[0] == texts_of[1]
    messages = [{"role": "assistant", "content": None}, {"role": "user", "content": "cat"}]
    assert call(served, "/v1/chat/completions", {"model": "chat/1", "messages": messages}).status == 200


def test_bytes_of_tokens_are_those_of_the_text(served: ServedText) -> None:
    body = {"model": "chat/1", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 30, "seed": 1}
    (choice,) = call(served, "/v1/chat/completions", {**body, "temperature": 2, "logprobs": True}).data["choices"]
    found = b"".join(bytes(token["bytes"] or []) for token in choice["logprobs"]["content"])
    assert "\ufffd" in choice["message"]["content"]  # the model makes bytes that are no text
    assert found.decode("utf-8", "replace") == choice["message"]["content"]


def test_a_prompt_that_is_too_long_is_found_before_others_are_answered() -> None:
    one = Counting(player())
    served = ServedText({"text/3": one})
    answer = call(served, "/v1/completions", {"model": "text/3", "prompt": ["a", "a" * (CONTEXT + 1)]})
    assert (answer.status, answer.data["error"]["code"]) == (400, "context_length_exceeded")
    assert one.num_tokens == 0
    served.stop()


class Counting:
    """Counts the tokens that a player makes."""

    def __init__(self, player: Any) -> None:
        self.player, self.num_tokens = player, 0
        self.kind, self.Request, self.about = player.kind, player.Request, player.about

    def answer(self, request: Any) -> Iterator[dict[str, Any]]:
        for piece in self.player.answer(request):
            self.num_tokens += "id" in piece
            yield piece


class Gated:
    """A player that makes a token when the test says so, and tells when its answer was ended."""

    kind, Request = "text", player().Request

    def __init__(self) -> None:
        self.may, self.made, self.ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
        self.begun = threading.Semaphore(0)
        self.is_broken = False

    def about(self) -> dict[str, Any]:
        return {"most_tokens": 1000, "has_chat": False}

    def answer(self, request: Any) -> Iterator[dict[str, Any]]:
        try:
            yield {"prompt_tokens": 1, "seen_tokens": 1}
            self.begun.release()
            while True:
                self.may.acquire()
                if self.is_broken:
                    raise RuntimeError("out of memory")
                self.made.release()
                yield {"id": 1, "token": "a", "text": "a", "logprob": -1.0, "alternatives": []}
        finally:
            self.ended.set()


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_ends_its_generation(is_stream: bool) -> None:
    gated = Gated()
    served = ServedText({"text/3": gated})
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps({"model": "text/3", "max_tokens": 900, "stream": is_stream})
    )
    for _ in range(3):
        gated.may.release()
        gated.made.acquire()
    assert connection.sock is not None
    if is_stream:
        connection.getresponse().close()
    connection.close()
    num_more = 0
    while not gated.ended.wait(0.01):  # each step may be the last before the server hears of it
        gated.may.release()
        num_more += 1
        assert num_more < 800, "it went on to the end"
    served.stop()


def test_who_comes_too_late_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(answers, "MOST_WAITING", 0)
    gated = Gated()
    served = ServedText({"text/3": gated})
    body = {"model": "text/3", "max_tokens": 900}
    first = threading.Thread(target=call, args=(served, "/v1/completions", {**body, "stop": "aaa"}))
    first.start()
    gated.may.release()
    gated.made.acquire()
    with pytest.raises(openai.RateLimitError) as caught:
        openai.OpenAI(base_url=f"{served.url}v1", api_key="x", max_retries=0).completions.create(prompt="a", **body)
    assert caught.value.code == "rate_limit_exceeded"
    gated.may.release(2)
    first.join()
    served.stop()


def test_all_choices_of_a_request_are_made_once_it_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(answers, "MOST_WAITING", 1)
    gated = Gated()
    served = ServedText({"text/3": gated})
    body = {"model": "text/3", "max_tokens": 900, "stop": "a"}
    found: list[Any] = []

    def ask(num: int) -> None:
        found.append(call(served, "/v1/completions", {**body, "n": num}))

    several = threading.Thread(target=ask, args=(2,))
    several.start()
    gated.begun.acquire()
    one = threading.Thread(target=ask, args=(1,))
    one.start()
    while call(served, "/v1/completions", {**body, "model": "nobody"}).status != 429:  # until both are in line
        pass
    gated.may.release(3)
    several.join()
    one.join()
    assert [answer.status for answer in found] == [200, 200]
    served.stop()


@pytest.mark.parametrize("path", ["/answer/0", "/v1/completions"])
def test_who_does_not_read_loses_the_place(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "write_s", 0.05)

    class Endless(Gated):
        def answer(self, request: Any) -> Iterator[dict[str, Any]]:
            try:
                yield {"prompt_tokens": 1, "seen_tokens": 1}
                while True:
                    yield {"id": 1, "token": "a", "text": "a" * (1 << 20), "logprob": -1.0, "alternatives": []}
            finally:
                self.ended.set()

    endless = Endless()
    served = ServedText({"text/3": endless})
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    body = {"prompt": "a"} if path.startswith("/answer") else {"model": "text/3", "stream": True}
    connection.request("POST", path, json.dumps(body))
    assert endless.ended.wait(30)
    connection.close()
    served.stop()


def test_a_run_that_is_not_there_and_a_full_line_are_answered(
    served: ServedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in ("4", "-1", "9" * 5000, "²"):
        answer = call(served, f"/answer/{quote(number)}", {})
        assert (answer.status, answer.data["code"]) == (404, "no-run")
    monkeypatch.setattr(answers, "MOST_AT_ONCE", 0)
    monkeypatch.setattr(answers, "MOST_WAITING", 0)
    answer = call(served, "/answer/0", b"{ not read")
    assert (answer.status, answer.data["code"]) == (429, "busy")


def test_a_client_that_goes_away_while_it_sends_is_no_failure(
    served: ServedText, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("/v1/completions", "/answer/0"):
        with socket.create_connection(("127.0.0.1", served.port)) as line:
            line.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{{".encode())
    assert call(served, "/v1/models", method="GET").status == 200
    assert "failed" not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("is_late", [False, True], ids=["before the first token", "after some"])
def test_a_model_that_fails_is_told(is_late: bool, caplog: pytest.LogCaptureFixture) -> None:
    gated = Gated()
    served = ServedText({"text/3": gated})
    gated.is_broken = not is_late
    gated.may.release()
    body = json.dumps({"model": "text/3", "max_tokens": 900, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", "/v1/completions", body)
    if is_late:
        gated.made.acquire()
        gated.is_broken = True
        gated.may.release()
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == (200 if is_late else 500)
    last = text.strip().split("\n\n")[-1].removeprefix("data: ")
    assert "out of memory" in json.loads(last)["error"]["message"]
    assert "[DONE]" not in text
    assert "out of memory" in caplog.text
    served.stop()
