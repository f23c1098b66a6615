"""If this fails, a recipe that encodes its data with a model does not learn where to run it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from rung.cli.data import command
from rung.recipe import Prepares, Recipe, Report
from tests.errors import raises_code


@dataclass
class Keys:
    pass


class Encoding(Recipe, Prepares):
    Config = Keys

    @classmethod
    def prepare(
        cls, cfg: Any, seed: int, source: Path | None, name: str | None, replace: bool, report: Report,
        device: str = "auto",
    ) -> tuple[Path, str]:  # fmt: skip
        return Path("data/encoded"), f"encoded on {device}"


def summary(*words: str) -> str:
    done = CliRunner().invoke(command, [f"{__name__}:Encoding", *words, "--json"], catch_exceptions=False)
    return str(json.loads(done.stdout)["summary"])


def test_the_device_reaches_the_recipe() -> None:
    assert summary() == "encoded on auto"
    assert summary("--device", "cpu") == "encoded on cpu"


def test_a_device_that_is_not_there_is_refused_before_anything_is_made() -> None:
    with raises_code("no-device"):
        summary("--device", "abacus")
