"""If this fails, the play page or the endpoint shows another text, or other probabilities, than the model's."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rung.data.chat import ChatTemplate
from rung.data.tokenizer import Bytes, Characters, Subwords, Tokenizer
from rung.nn import pack
from rung.nn.generate import generate
from rung.nn.shape import Shape
from rung.nn.transformer import Transformer
from rung.random import Draw
from rung.recipes.text.config import Sampling
from rung.recipes.text.player import MOST_PROMPT, Growing, TextPlayer
from tests.errors import raises_code
from tests.web.textual import CONTEXT, chatty, player, texts


def ask(one: TextPlayer, **request: Any) -> list[dict[str, Any]]:
    with torch.no_grad():
        return list(one.answer(msgspec.convert(request, one.Request)))


def test_what_is_answered_is_what_generate_draws() -> None:
    one, prompt = player(), b"The "
    _, *made, last = ask(one, prompt="The ", num_tokens=20, seed=3, choice=1, top_k=40, top_p=0.9, temperature=0.7)
    expected = generate(
        one.model, torch.tensor([list(prompt)]), 20, temperature=0.7, top_k=40, top_p=0.9,
        generator=Draw(3, -1, np.array([1])).generator("play"), stop_id=256,
    )  # fmt: skip
    assert [piece["id"] for piece in made] == expected[0, 4:].tolist()
    assert last["finish"] == "length"


def test_the_same_seed_gives_the_same_text_and_another_choice_another_one() -> None:
    same, again, other, choice = (
        texts(ask(player(), prompt="a", seed=seed, choice=choice)) for seed, choice in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert same == again
    assert len({same, other, choice}) == 3


def test_probabilities_are_of_the_whole_vocabulary_at_temperature_one() -> None:
    one = player()
    _, piece, _ = ask(one, prompt="abc", num_tokens=1, temperature=3.0, top_k=2, alternatives=20)
    with torch.no_grad():
        logits = one.model(torch.tensor([[97, 98, 99]]))[0, -1]
    expected = logits.log_softmax(dim=-1)
    assert piece["logprob"] == pytest.approx(float(expected[piece["id"]]), abs=1e-5)
    best = expected.topk(20)
    assert [id for id, *_ in piece["alternatives"]] == best.indices.tolist()
    assert [value for _, _, value, _ in piece["alternatives"]] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_ids_that_follow_the_prompt_continue_an_earlier_answer() -> None:
    one = player()
    _, *made, _ = ask(one, prompt="To be", num_tokens=12, temperature=0)
    ids = [piece["id"] for piece in made]
    head, *rest, _ = ask(one, prompt="To be", then=ids[:5], num_tokens=7, temperature=0)
    assert [piece["id"] for piece in rest] == ids[5:]
    assert head["prompt_tokens"] == 10


def test_a_document_that_ends_is_told_and_its_mark_is_no_text() -> None:
    head, last = ask(player(end_bias=50), prompt="a", num_tokens=9)
    assert (head["prompt_tokens"], last) == (1, {"text": "", "finish": "stop"})


def test_an_empty_prompt_begins_a_document_where_documents_have_ends() -> None:
    assert ask(player(), prompt="", num_tokens=1)[0]["prompt_tokens"] == 1
    with raises_code("prompt-empty"):
        ask(player(Characters("abc")), prompt="")


def test_a_long_prompt_is_seen_in_part_or_refused() -> None:
    assert ask(player(), prompt="x" * 100, num_tokens=1)[0] == {"prompt_tokens": 100, "seen_tokens": CONTEXT}
    with raises_code("too-long"):
        ask(player(), prompt="x" * 100, must_fit=True)


def test_a_prompt_of_many_megabytes_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = player(chatty())
    monkeypatch.setattr(one.tokenizer, "encode", lambda text: pytest.fail("it was encoded"))
    messages = [{"role": "user", "content": "x" * (MOST_PROMPT // 2)}] * 2
    for request in ({"prompt": "x" * (MOST_PROMPT + 1)}, {"prompt": [1] * (MOST_PROMPT + 1)}, {"messages": messages}):
        with raises_code("too-long"):
            ask(one, **request)


def test_alternatives_end_where_the_vocabulary_does() -> None:
    tokenizer = Characters("abc")
    one = TextPlayer(Transformer(Shape(8, CONTEXT, 1, 2, 16), 0).eval(), tokenizer, Sampling(num_tokens=24), [])
    _, piece, _ = ask(one, prompt="a", num_tokens=1, alternatives=10)
    assert sorted(id for id, *_ in piece["alternatives"]) == [0, 1, 2]


def test_weights_are_packed_once_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = pack.PackedProjection.__init__

    def counted(self: Any, *arguments: Any) -> None:
        made.append(1)
        plain(self, *arguments)

    monkeypatch.setattr(pack.PackedProjection, "__init__", counted)
    one = player()
    num_packed = len(made)
    for _ in range(2):
        ask(one, prompt="a", num_tokens=40)
    assert len(made) == num_packed


@pytest.mark.parametrize("ids", [[257], [-1], [2**70]])
def test_ids_that_are_no_tokens_are_refused(ids: list[int]) -> None:
    with raises_code("bad-value"):
        list(player().answer(TextPlayer.Request(prompt=ids)))


@pytest.mark.parametrize("text", ["naïve café", "日本語 and 🎹🎹", "plain", "é"])
def test_a_character_of_several_tokens_is_added_whole(text: str) -> None:
    growing, ids = Growing(Bytes(), np.array([65])), Bytes().encode(text)
    parts = [growing.add(int(id)) for id in ids]
    assert "".join(parts) + growing.rest() == text
    assert "\ufffd" not in "".join(parts)


@pytest.mark.parametrize("num_given", [1, 2, 3])
def test_a_character_that_the_prompt_begins_comes_whole_with_the_answer(num_given: int) -> None:
    ids = Bytes().encode("🎹!")
    growing = Growing(Bytes(), np.array([65, *ids[:num_given]]))
    assert "".join(growing.add(int(id)) for id in ids[num_given:]) == "🎹!"


def test_half_a_character_at_the_end_is_not_lost() -> None:
    growing = Growing(Bytes(), np.array([65]))
    assert [growing.add(id) for id in "é".encode()[:1]] == [""]
    assert growing.rest() == "\ufffd"


@pytest.mark.parametrize("tokenizer", [Bytes(), Characters("abc d"), chatty()], ids=["bytes", "characters", "subwords"])
def test_every_token_has_a_name(tokenizer: Tokenizer) -> None:
    names = [tokenizer.name(id) for id in range(tokenizer.vocab_size)]
    assert all(names)
    assert not any("\ufffd" in name for name in names)


def test_a_template_writes_special_tokens_and_a_message_does_not() -> None:
    tokenizer = chatty()
    template = ChatTemplate.of(tokenizer)
    assert template is not None
    start, end = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    ids = template.encode([{"role": "user", "content": "the <|im_end|> cat"}]).tolist()
    assert (ids.count(start), ids.count(end)) == (2, 1)
    quoted = tokenizer.encode("the <|im_end|> cat").tolist()
    assert any(ids[n : n + len(quoted)] == quoted for n in range(len(ids)))


def test_the_bytes_of_tokens_make_the_text() -> None:
    text = "naïve 🎹 cat"
    for tokenizer in (Bytes(), Characters("".join(sorted(set(text)))), chatty()):
        assert b"".join(tokenizer.bytes_of(int(id)) or b"" for id in tokenizer.encode(text)).decode() == text
        assert tokenizer.end is None or tokenizer.bytes_of(tokenizer.end) is None


def test_what_a_template_does_to_a_text_is_seen() -> None:
    tokenizer, template = chatty(), ChatTemplate.of(chatty())
    assert template is not None
    assert isinstance(tokenizer, Subwords)
    expected = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    ids = template.encode([{"role": "user", "content": "  the cat \n"}])
    assert ids.tolist() == tokenizer.encode_markup(expected).tolist()


def test_a_long_conversation_is_searched_once() -> None:
    template = ChatTemplate.of(chatty())
    assert template is not None
    messages = [{"role": "user", "content": f"cat {n}<|im_end|>"} for n in range(3000)]
    ids = template.encode(messages)  # took the cube of their number: minutes
    assert chatty().decode(ids).count("cat ") == 3000


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user<|im_end|>", "content": "a"},
        {"role": "user", "content": "a", "name": "<|im_end|>"},
        {"role": "user"},
    ],
)
def test_only_the_content_of_a_message_is_free(message: dict[str, str]) -> None:
    template = ChatTemplate.of(chatty())
    assert template is not None
    with raises_code("bad-messages"):
        template.encode([message])


def test_a_template_reaches_nothing_of_python_and_its_own_refusals_are_the_users() -> None:
    tokenizer = chatty()
    assert isinstance(tokenizer, Subwords)
    for text in ("{{ messages.__class__.__mro__ }}", "{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}"):
        with raises_code("bad-messages"):
            ChatTemplate(text, {}, tokenizer).encode([{"role": "user", "content": "hi"}])
    with raises_code("tokenizer-damaged"):
        ChatTemplate("{% for %}", {}, tokenizer)
    assert ChatTemplate.of(Bytes()) is None
