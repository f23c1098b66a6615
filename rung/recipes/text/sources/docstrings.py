"""The embedded text: docstrings of packages that are installed anyway, by subject.

Files are parsed, never imported. All docstrings of a module are one group: they quote each other. The corpus changes
with the versions of the packages, so that its name is not what it is: the manifest has a hash of the text.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from rung.errors import DataError
from rung.recipes.text.sources import Document, Quarantine, Source

MIN_CHARACTERS = 200  # a shorter one says little more than its name
# torch brings sympy and networkx, rung needs numpy; the rest is the standard library.
CATEGORIES = {
    "algebra": ("sympy/polys", "sympy/matrices", "sympy/solvers"),
    "arrays": ("numpy/lib", "numpy/_core", "numpy/ma", "numpy/linalg", "numpy/polynomial"),
    "combinatorics": ("sympy/combinatorics",),
    "concurrency": ("asyncio", "concurrent", "multiprocessing", "threading.py", "queue.py", "subprocess.py"),
    "geometry": ("sympy/geometry",),
    "graphs": ("networkx",),
    "gui": ("tkinter", "idlelib"),
    "net": (
        "http", "urllib", "email", "xmlrpc", "wsgiref",
        "ftplib.py", "imaplib.py", "smtplib.py", "socket.py", "socketserver.py", "ipaddress.py",
    ),
    "number_theory": ("sympy/ntheory",),
    "physics": ("sympy/physics",),
    "statistics": ("sympy/stats",),
}  # fmt: skip
PACKAGES = ("sympy", "networkx", "numpy")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source() -> Source:
    roots = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # the folder that holds it, found without importing it
        if spec is None or spec.origin is None:
            problem = f"the embedded text is made of docstrings, and {package} is not installed"
            remedy = f"`pip install {package}`, or pass --from with your own text"
            raise DataError(f"{problem}: {remedy}", code="not-installed")
        roots[package] = Path(spec.origin).parents[1]
    library = Path(sysconfig.get_path("stdlib"))
    places = {place: roots.get(place.split("/")[0], library) / place for all_ in CATEGORIES.values() for place in all_}
    missing = sorted(place for place, path in places.items() if not path.exists())
    note = (f"not installed here, so left out: {', '.join(missing)}",) if missing else ()

    @functools.cache  # 6 MB; parsing takes longer than all else
    def parsed() -> tuple[list[Document], dict[str, str]]:
        bad: dict[str, str] = {}
        return list(_documents(places, bad.__setitem__)), bad

    def read(quarantine: Quarantine) -> Iterator[Document]:
        documents, bad = parsed()
        yield from documents
        for file, reason in bad.items():
            quarantine(file, reason)

    return Source("docstrings of sympy, networkx, numpy and the standard library", read, note)


def _documents(places: dict[str, Path], quarantine: Quarantine) -> Iterator[Document]:
    seen: set[str] = set()
    for category, of_category in CATEGORIES.items():
        for place in of_category:
            root = places[place]
            for file in [root] if root.suffix == ".py" else sorted(root.rglob("*.py")):
                name = place if file == root else f"{place}/{file.relative_to(root).as_posix()}"
                if not any(part.startswith("test") or part == "idle_test" for part in name.split("/")):
                    yield from _of_module(file, name, category, seen, quarantine)


def _of_module(file: Path, name: str, category: str, seen: set[str], quarantine: Quarantine) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's odd escapes
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        quarantine(name, f"cannot be parsed: {error}")
        return
    for node in _documented(tree):
        text = ast.get_docstring(node)
        if text is None or len(text) <= MIN_CHARACTERS:
            continue
        same = " ".join(text.casefold().split())
        if same not in seen:
            seen.add(same)
            line = getattr(node, "lineno", 1)
            yield Document(text, category, f"{name}:{line}", group=name, number=len(seen) - 1)


def _documented(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """What can have a docstring, at any depth. Expressions hold none: ast.walk took 2.9 s here, this 0.3."""
    if isinstance(node, _DOCUMENTED):
        yield node
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        inside = getattr(node, block, None)
        for child in inside if isinstance(inside, list) else ():
            yield from _documented(child)
