"""If this fails, bench.compare_commits calls two commits identical that are not, or finds differences that are none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench import compare_lab
from bench.compare_commits import Side, flat, parsed, show, tensors, without_places


def differences(before: dict[str, Any], after: dict[str, Any], **expected: Any) -> list[tuple[Any, ...]]:
    sides = [{"train text": {"exit code": 0, **values}} for values in (before, after)]
    found = show("losses", *sides, expected)["differences"]
    return [(each["path"], each["before"], each["after"]) for each in found]


def test_the_last_digit_counts() -> None:
    number = 4.191587924957275
    assert differences({"loss": number}, {"loss": number}) == []
    following = math.nextafter(number, 5)
    assert differences({"loss": number}, {"loss": following}) == [("loss", number, following)]


def test_what_one_side_lacks_is_a_difference() -> None:
    assert differences({"loss": 1.0}, {}) == [("loss", 1.0, "absent")]
    assert differences({}, {"loss": None}) == [("loss", "absent", None)]


def test_nan_equals_nan_and_differs_from_a_number() -> None:
    row = flat(parsed('{"loss": NaN, "norm": Infinity, "lr": 0.5}'))
    assert differences(row, dict(row)) == []
    assert differences(row, {**row, "loss": 0.0}) == [("loss", "NaN", 0.0)]


def test_times_and_memory_are_left_out_and_empty_lists_are_not() -> None:
    row = {"step": 3, "unix_s": 1.0, "step_s": 0.1, "rss_mb": 9.0, "loss": 2.0, "parts": [], "a": [{"b": 1}]}
    assert flat(row) == {"step": 3, "loss": 2.0, "parts": [], "a[0].b": 1}


def test_what_was_changed_on_purpose_is_no_difference() -> None:
    before, after = {"norm_clipped": 1.0, "kind": "own_loop"}, {"norm_after": 1.0, "kind": "script"}
    names = [{"from": "norm_clipped", "to": "norm_after"}]
    values = [{"from": "own_loop", "to": "script"}]
    assert differences(before, after, renamed=names, values=values) == []
    assert differences(before, {**after, "norm_after": 2.0}, renamed=names, values=values) == [("norm_after", 1.0, 2.0)]
    changed = [{"where": "^train text: (kind|norm)", "why": "as planned"}]
    assert differences(before, after, changed=changed) == []


def test_the_words_of_a_side_follow_its_names() -> None:
    expected = {"config": {"lr.min_lr": "lr.minimum"}, "verbs": {"data show": "data look"}}
    base = Side("base", None, Path(), Path(), {})
    head = base._replace(expected=expected)
    line = "train text seed=1 lr.min_lr=0 --why 'a b' seed=2 dataset.base_dataset_name=x=y"
    words = ["train", "text", "seed=2", "lr.min_lr=0", "--why", "a b", "dataset.base_dataset_name=x=y"]
    assert base.words(line) == words
    assert head.words(line) == [word.replace("lr.min_lr", "lr.minimum") for word in words]
    assert head.words("data show piano --json") == ["data", "look", "piano", "--json"]


def test_folders_of_a_comparison_have_names() -> None:
    found = without_places({"/x/place/a": "in /x/place/runs", "n": 3}, {Path("/x/place"): "PLACE"})
    assert found == {"PLACE/a": "in PLACE/runs", "n": 3}


def test_a_tensor_is_known_by_its_bytes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    weights = {"w": torch.ones(2, 3), "b": torch.zeros(4)}
    save_file(weights, tmp_path / "a", metadata={"step": "1"})
    save_file(weights, tmp_path / "b", metadata={"step": "2"})
    weights["w"][1, 2] = math.nextafter(1, 2) + 1e-7
    save_file(weights, tmp_path / "c")
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert a == b
    assert a["b"] == c["b"]
    assert a["w"] != c["w"]


def test_every_preset_is_compared_or_left_out_with_a_reason() -> None:
    presets = {
        f"{path.parts[-3]} {path.stem}"
        for path in (Path(__file__).parents[1] / "rung" / "recipes").glob("*/presets/*.yaml")
    }
    assert presets
    assert presets - {case.name for case in compare_lab.CASES} == presets & set(compare_lab.LEFT_OUT)
