"""If this fails, a mistake of a user has no code of its own, and scripts and tests would have to match its prose."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rung.errors

ROOT = Path(__file__).resolve().parents[1]
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
GENERAL = {"UserError", *(name for name in vars(rung.errors) if name.endswith("Error"))}  # their own code says little


def parsed() -> dict[str, ast.Module]:
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text("utf-8")) for p in sorted((ROOT / "rung").rglob("*.py"))}


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def user_errors(trees: Mapping[str, ast.Module]) -> set[str]:
    """The names of UserError and of every class below it, wherever it is defined."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, before = {"UserError"}, 0
    while len(found) > before:
        before = len(found)
        found |= {node.name for node in classes if any(name_of(base) in found for base in node.bases)}
    return found


def own_codes(trees: Mapping[str, ast.Module], errors: set[str]) -> set[str]:
    """Classes besides the general ones that say in their body which mistake they are."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assigned = [(node.name, line) for node in classes for line in node.body if isinstance(line, ast.Assign)]
    return {
        name
        for name, line in assigned
        if name in errors - GENERAL and name_of(line.targets[0]) == "code" and is_code(line.value)
    }


def is_code(value: ast.expr) -> bool:
    """A literal slug, a choice between two, or a variable or an attribute called code."""
    if isinstance(value, ast.IfExp):
        return is_code(value.body) and is_code(value.orelse)
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str) and SLUG.fullmatch(value.value) is not None
    return name_of(value) == "code"


def offenders(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    errors = user_errors(trees)
    coded = own_codes(trees, errors)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name_of(node.func) not in errors:
                continue
            codes = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            if not codes and name_of(node.func) not in coded:
                yield f"{path}:{node.lineno} {name_of(node.func)} has no code"
            elif codes and not is_code(codes[0]):
                yield f"{path}:{node.lineno} {name_of(node.func)} has the code {ast.unparse(codes[0])}"


def test_every_mistake_of_a_user_has_a_code() -> None:
    found = list(offenders(parsed()))
    assert not found, f"{len(found)} errors without a code:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ('raise UserError("no", code="no-run")', True),
        ('raise errors.UserError("no", code="no-run")', True),
        ('def f(code):\n    return Mine("no", code=code)\nclass Mine(UserError): ...', True),
        ('raise UserError("no", code=other.code)', True),
        ('raise UserError("no", code="no-file" if gone else "bad-file")', True),
        ('class Mine(UserError):\n    code = "mine"\nraise Mine("no")', True),
        ('raise UserError("no")', False),
        ('raise UserError("no", code="No run")', False),
        ('raise UserError("no", code=f"no-{x}")', False),
        ('class Mine(UserError): ...\nclass Yours(Mine): ...\nraise Yours("no")', False),
        ('class ConfigError(UserError):\n    code = "config"\nraise ConfigError("no")', False),
    ],
)
def test_the_rule_sees_what_it_should(text: str, is_fine: bool) -> None:
    assert (not list(offenders({"a.py": ast.parse(text)}))) == is_fine
