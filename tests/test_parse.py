"""If this fails, a file of a few hundred bytes takes gigabytes, ends the process, keeps it waiting, or is read as
something else than it says."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rung import parse
from rung.config import Layer, Schema, key, load_file, parse_overrides
from rung.runs.files import read_lines
from tests.errors import raises_code

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
MERGED = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i}\n" + "".join(f"  k{j}: {{<<: *a{i - 1}, j{j}: 1}}\n" for j in range(9)) for i in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS, MERGED, "a: &a [*a]", "a: &a {b: [*a]}", "[" * 100_000, "[" * 101 + "]" * 101, "- " * 5000,
        "&a " + "[" * 60 + "x" + "]" * 60 + "\n", "a: " + "9" * 6000, "2001-02-31", "? [a]\n: 1", "!!int",
        "!!timestamp x", "!!python/object/apply:os.system [ls]", "*a", "\x00", "{", "--- 1\n--- 2", "!!bool x", "!!omap [1]", "a: b: c",  # noqa: E501
    ],
)  # fmt: skip
def test_yaml_that_is_odd_is_a_parse_error(text: str) -> None:
    if text.startswith("&a "):  # an alias is as deep as what it stands for
        text = f"a: {text}b: {'[' * 60}*a{']' * 60}"
    with pytest.raises(parse.ParseError):
        parse.yaml(text)


def test_yaml_keeps_its_anchors() -> None:
    text = "base: &base {lr: 1.0e-4, steps: [1, 2]}\nmine:\n  <<: *base\n  lr: 2.0e-4\nagain: *base\n"
    base = {"lr": 1e-4, "steps": [1, 2]}
    assert parse.yaml(text) == {"base": base, "mine": {**base, "lr": 2e-4}, "again": base}
    assert parse.yaml(b"") is None
    assert parse.checked_yaml(text.encode()).read() == text


@pytest.mark.parametrize(
    "data", [b"[" * 5000, b"[" * 10**6 + b"]" * 10**6, b'{"a":' * 101 + b"1" + b"}" * 101, b"", b"\xff", b'{"a"',
             b"[1,]", b"9" * 5000, b"[" + b"[]," * 6_000_000 + b"1]"],
)  # fmt: skip
def test_json_that_is_odd_is_a_parse_error(data: bytes) -> None:
    for read in (parse.json, parse.loose_json):
        with pytest.raises(parse.ParseError) as error:
            read(data)
        assert str(error.value)


def test_json_is_read_to_the_allowed_depth_and_keeps_its_floats() -> None:
    data = b"[" * 100 + b"]" * 100
    assert parse.json(data) == parse.loose_json(data)
    assert parse.loose_json(b'\xef\xbb\xbf{"a": NaN, "b": [Infinity, 1, 1]}')["b"] == [float("inf"), 1, 1]
    assert parse.json(b'{"a": 1, "a": 2}') == parse.loose_json(b'{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(parse.ParseError):
        parse.json(b"[NaN]")


def test_341_bytes_of_aliases_take_no_memory() -> None:
    program = (
        "import resource, sys\nfrom rung import parse\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try: parse.yaml(sys.stdin.read())\nexcept parse.ParseError as error: print(error)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=LAUGHS, capture_output=True, text=True, check=True)
    *_, kilobytes = done.stdout.split()
    assert int(kilobytes) < 100_000


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (parse.read_bytes, parse.open_file, lambda path: list(read_lines(path))):
        with pytest.raises(OSError, match="egular"):
            read(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        parse.open_file(tmp_path)


def test_sizes_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    with file.open("wb") as out:
        out.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(parse.ParseError):
        parse.read_bytes(file)
    file.write_bytes(b'{"a": 1}\n' + b"x" * 1000 + b'\n{"a": 2}\n')
    monkeypatch.setattr(parse, "MOST_LINE_BYTES", 100)
    with parse.open_file(file) as opened:
        pieces = list(parse.lines(opened, 100))
    assert b"".join(pieces) == file.read_bytes()
    assert max(map(len, pieces)) == 100


SHAPE = {"a": int, "b": {"*": (int, float)}, "c": [{"d": str}]}


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({}, None), ({"a": None, "b": None, "c": None, "more": object()}, None), ({"a": 1, "b": {"x": 1.5}}, None),
        ({"c": [{}, {"d": "x"}]}, None), ([], "it "), ({"a": True}, "it.a"), ({"a": "1"}, "it.a"),
        ({"b": {"x": []}}, "it.b.x"), ({"c": {}}, "it.c"), ({"c": [None]}, "it.c[0]"), ({"c": [{"d": 1}]}, "it.c[0].d"),
    ],
)  # fmt: skip
def test_a_shape_names_what_does_not_fit(value: Any, wrong: str | None) -> None:
    found = parse.mismatch(value, SHAPE, "it")
    assert found is None if wrong is None else found is not None and found.startswith(wrong)


@dataclass
class Names:
    a: str = key("x", "A name.")
    b: str = key("x", "A name.")
    c: str = key("x", "A name.")


def test_a_users_own_yaml_has_the_same_limits(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    for text in (LAUGHS, "a: " + "[" * 100_000, "a: " + "9" * 6000):
        file.write_text(text)
        with raises_code("bad-file"):
            load_file(file)
    for word in ("a=" + "[" * 100_000, "a=" + "9" * 6000):
        with raises_code("bad-value"):
            parse_overrides([word])
    os.mkfifo(tmp_path / "pipe.yaml")
    with raises_code("cannot-read"):
        load_file(tmp_path / "pipe.yaml")
    file.write_text("base: &base {a: x}\na: 8e-5\nmore: *base\n")
    assert load_file(file) == {"base": {"a": "x"}, "a": 8e-5, "more": {"a": "x"}}


def test_references_cannot_double_their_text_for_ever() -> None:
    tree = {"a": "${b}" * 40, "b": "${c}" * 40, "c": "x"}
    with raises_code("bad-value"):
        Schema({"o": Names}).resolve([Layer("file", tree)])
    assert Schema({"o": Names}).resolve([Layer("file", {"a": "${b}${b}"})]).values["a"] == "xx"
