"""If this fails, `make run`, `make test` or the image installs something else than it says, or torch with CUDA packages
that nobody asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
FOR_DEVELOPERS = {"pytest", "mypy", "ruff", "ray", "moto", "lightning", "wandb", "playwright", "trackio", "datasets"}


def packages(extra: str) -> set[str]:
    """The names behind an extra, those of the extras it names too."""
    found = set[str]()
    for line in EXTRAS[extra]:
        name, others = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?.*", line).groups()  # type: ignore[union-attr]
        found |= set().union(*map(packages, others.split(","))) if name == "rung" else {name}
    return found


def installs(lines: list[str]) -> list[str]:
    return [line.partition(" install ")[2] for line in lines if "pip install " in line]


def test_a_newcomer_gets_what_running_needs_and_no_more() -> None:
    assert {"symusic", "pillow", "soundfile", "starlette", "uvicorn", "tokenizers"} <= packages("start")
    assert not packages("start") & FOR_DEVELOPERS
    assert packages("dev") >= packages("start") | FOR_DEVELOPERS


def test_every_extra_that_a_sentence_names_exists() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "rung").rglob("*.py")]
    texts += [path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")]
    named = {name for text in texts for found in re.findall(r"rung\[([\w,]+)\]", text) for name in found.split(",")}
    assert named <= set(EXTRAS)


@pytest.mark.parametrize(("target", "extra"), [("run", "start"), ("test", "dev")])
def test_make_installs_torch_first_and_then_what_the_target_needs(target: str, extra: str, tmp_path: Path) -> None:
    if not shutil.which("make"):
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "rung/web/page").mkdir(parents=True)
    (tmp_path / "rung/web/page/index.html").touch()
    done = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
    steps = installs(done.stdout.splitlines())
    assert re.fullmatch(r".*-c constraints.txt torch", steps[0])
    asked = [found[1] for step in steps if (found := re.search(r"'\.\[(\w+)\]'", step))]
    assert asked[-1] == extra
    assert all("-c constraints.txt" in step for step in steps if "--no-deps" not in step)


def test_the_image_is_built_as_images_should_be() -> None:
    """What a linter of such files says first; the image itself is built by nobody here."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text("utf-8"))
    steps = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    words = [word for word, _ in steps]
    assert set(words) <= {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert words[0] == "FROM"
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", steps[0][1]), "a tag with a version, not latest"
    for word, rest in steps:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
        if "apt-get install" in rest:
            assert "apt-get update" in rest
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists" in rest
        if "pip install" in rest:
            assert "--no-cache-dir -c constraints.txt" in rest
        if word in ("ENTRYPOINT", "CMD"):
            assert rest.startswith("["), "without a shell, so that Ctrl-C reaches rung"
    assert installs([rest for _, rest in steps])[0].endswith(" torch")
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert dict(map(tuple, steps))["USER"] != "root"
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    assert {".git", ".venv", "runs", "data"} <= set(ignored)
