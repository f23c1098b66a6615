"""If this fails, rung is installed without its web pages, with old ones, or asks for node where none is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hatch_build

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "rung" / "web" / "static"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small copy of what is needed to build, and a PATH with neither node nor npm."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore", "supply.py", "locked.txt"):
        shutil.copy(ROOT / name, copy)
    (copy / "rung").mkdir()
    shutil.copy(ROOT / "rung" / "__init__.py", copy / "rung")
    shutil.copytree(
        ROOT / "rung" / "web", copy / "rung" / "web", ignore=shutil.ignore_patterns("node_modules", "static")
    )
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("RUNG_WITHOUT_PAGES", raising=False)
    return copy


def command(checkout: Path, name: str, text: str) -> None:
    path = checkout.parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def put_page(checkout: Path) -> None:
    """As after a build: any page, with the stamp of these sources."""
    static = checkout / "rung" / "web" / "static"
    static.mkdir()
    (static / "world.html").write_text("<!doctype html>")
    (static / hatch_build.STAMP).write_text(hatch_build.fingerprint(checkout / "rung" / "web" / "page"))


def backend(checkout: Path, call: str) -> subprocess.CompletedProcess[str]:
    """Calls hatchling as pip does."""
    code = f"import json, hatchling.build as b; print(json.dumps(b.{call}))"
    return subprocess.run([sys.executable, "-c", code], cwd=checkout, env=os.environ, capture_output=True, text=True)


def test_a_wheel_carries_the_built_page_and_not_its_sources(checkout: Path) -> None:
    put_page(checkout)
    done = backend(checkout, "build_wheel('.')")  # there is no node: nothing is built twice
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(checkout / json.loads(done.stdout)) as wheel:
        names = wheel.namelist()
        (bill,) = (json.loads(wheel.read(name)) for name in names if name.endswith("sboms/rung.cdx.json"))
    assert "rung/web/static/world.html" in names
    assert "rung/web/play.py" in names
    assert not [name for name in names if "/page/" in name or "hatch_build" in name or "supply" in name]
    found = {one["name"]: one for one in bill["components"]}
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {"torch", "numpy", "uplot", "obstore"} <= set(found)
    assert found["numpy"]["hashes"][0]["content"] in (ROOT / "locked.txt").read_text()
    assert found["click"]["scope"] == "required"
    assert "pytest" not in found


def test_node_is_asked_for_only_when_it_is_needed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> list[str]:
        done = backend(checkout, "get_requires_for_build_wheel()")
        assert done.returncode == 0, done.stderr
        found: list[str] = json.loads(done.stdout)
        return found

    assert asked() == [hatch_build.NODE_WHEEL]
    with monkeypatch.context() as patch:
        patch.setenv("RUNG_WITHOUT_PAGES", "1")
        assert asked() == []
    put_page(checkout)
    assert asked() == []
    with (checkout / "rung/web/page/src/main.ts").open("a") as file:
        file.write("// changed\n")
    assert asked() == [hatch_build.NODE_WHEEL]
    command(checkout, "node", "echo v24.1.0")
    command(checkout, "npm", "exit 1")
    assert asked() == []


@pytest.mark.parametrize(
    ("version", "is_fit"),
    [
        ("v18.20.4", False),
        ("v20.18.3", False),
        ("v20.19.0", True),
        ("v21.7.3", False),
        ("v22.11.0", False),
        ("v22.12.0", True),
        ("v24.19.0", True),
        ("nonsense", False),
    ],
)
def test_the_node_on_the_path_must_be_new_enough(checkout: Path, version: str, is_fit: bool) -> None:
    assert hatch_build.npm_on_path() is None
    command(checkout, "node", f"echo {version}")
    assert hatch_build.npm_on_path() is None  # no npm
    command(checkout, "npm", "exit 0")
    assert (hatch_build.npm_on_path() is not None) == is_fit


def test_a_page_that_cannot_be_built_stops_the_install_and_says_what_to_do(checkout: Path) -> None:
    command(checkout, "node", "echo v22.12.0")
    command(checkout, "npm", "echo no network; exit 1")
    done = backend(checkout, "build_wheel('.')")
    assert done.returncode != 0
    assert "RUNG_WITHOUT_PAGES=1 installs rung without its web pages" in done.stderr
    assert "no network" in done.stderr
    assert not list(checkout.glob("*.whl"))


def test_a_build_installs_what_the_lock_names_then_bundles(checkout: Path) -> None:
    command(checkout, "node", "echo v22.12.0")
    script = "echo $* >> asked; mkdir -p ../static; if [ $1 = run ]; then echo page > ../static/world.html; fi"
    (checkout.parent / "bin" / "mkdir").symlink_to("/bin/mkdir")
    command(checkout, "npm", script)
    page = checkout / "rung" / "web" / "page"
    hatch_build.build(checkout)
    assert (page / "asked").read_text().split("\n")[:2] == ["ci", "run build"]
    (page / "asked").unlink()
    assert not hatch_build.is_due(checkout)
    (page / "world.html").write_text("other")
    assert hatch_build.is_due(checkout)


def test_the_lock_names_no_registry() -> None:
    lock = json.loads((ROOT / "rung/web/page/package-lock.json").read_text("utf-8"))
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
    assert all("integrity" in package for name, package in lock["packages"].items() if name)


def test_the_page_here_was_built_from_the_sources_here() -> None:
    stamp = STATIC / hatch_build.STAMP
    if not stamp.exists():
        pytest.skip("the page is not built; `make page` builds it")
    assert stamp.read_text() == hatch_build.fingerprint(ROOT / "rung" / "web" / "page"), "`make page` builds it anew"
