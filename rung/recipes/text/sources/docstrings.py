"""The embedded text: docstrings of packages that are installed anyway, by subject.

Files are parsed, never imported. All docstrings of a module are one group: they quote each other. The corpus changes
with the versions of the packages, so that its name is not what it is: the manifest has a hash of the text.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from rung.data.docstrings import docstrings, home_of, modules, parse
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


def source() -> Source:
    roots = {}
    for package in PACKAGES:
        home = home_of(package)
        if home is None:
            problem = f"the embedded text is made of docstrings, and {package} is not installed"
            remedy = f"`pip install {package}`, or pass --from with your own text"
            raise DataError(f"{problem}: {remedy}", code="not-installed")
        roots[package] = home
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
            for file, name in modules(places[place], place):
                try:
                    tree = parse(file)
                except (OSError, SyntaxError, ValueError) as error:
                    quarantine(name, f"cannot be parsed: {error}")
                    continue
                for line, text in docstrings(tree):
                    same = " ".join(text.casefold().split())
                    if len(text) > MIN_CHARACTERS and same not in seen:
                        seen.add(same)
                        yield Document(text, category, f"{name}:{line}", group=name, number=len(seen) - 1)
