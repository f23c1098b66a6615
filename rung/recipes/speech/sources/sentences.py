"""What the embedded voices say: rows of digits, or plain English sentences out of docstrings.

Docstrings are those of packages that are installed with rung, of the standard library, and its help on the language;
source is parsed and never imported. Whatever a voice would have to spell is left out: names of code, numbers, signs.
Which sentences there are depends on the versions of the packages.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rung.data.docstrings import docstrings, home_of, modules, parse
from rung.errors import DataError
from rung.random import key_of

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAIN_LENGTHS = (1, 2, 3, 4, 5)
HELD_LENGTHS = (2, 3, 3, 4, 4, 4, 5, 5, 5, 5)  # there are only 100 rows of two, and most of them should be learned
FEWEST_WORDS, MOST_WORDS = 4, 14
# Names of code are mostly at home in one module; those that more of them use are listed in CODE.
FEWEST_MODULES = 3
PACKAGES = ("numpy", "sympy", "networkx")
NOT_LIBRARY = ("site-packages", "dist-packages", "test", "idlelib", "lib2to3")
CODE = re.compile(
    "addr|args?|async|attrs?|bool|builtins?|cls|codecs?|config|coset|ctypes|datetime|denest|dicts?|dir|distutils|docs?|"
    "docstrings?|dotprodsimp|dtypes?|dyadic|dynamicsymbols|ebunch|elif|enum|etc|eval|exec|expr|filenames?|fullname|func|"
    "getattr|gid|groebner|init|inplace|ints?|kets?|lambdify|latex|len|linearize|matplotlib|mixin|mul|namedtuple|"
    "namespaces?|nan|nbunch|ndarrays?|nqubits|numpy|obj|params?|pathname|polys?|regex|repr|risch|scipy|setattr|spec|"
    "stderr|stdin|stdout|str|struct|subs|symlinks?|sympify|sympifyable|sympy|toplevel|tuples?|ufuncs?|uid|unicode|urls?|"
    "utils|vars?"
)
SHORT = re.compile("[aAI]|(?i:am|an|as|at|be|by|do|go|he|if|in|is|it|me|my|no|of|on|or|so|to|up|us|we)")
_WORD = re.compile(r"(?=.*[aeiouyAEIOUY])[A-Z]?[a-z]+(?:'[a-z]{1,2})?|[A-Z]")
_END = re.compile(r"(?<=[.!?:;])\s+")


def digit_texts(num_held: int, num_train: int, seed: int) -> tuple[list[str], list[str]]:
    """Rows of two digits or more that training never says, each once, and rows for training, at random."""
    rng = np.random.default_rng(key_of(seed, "digits"))

    def draw(lengths: Sequence[int]) -> str:
        return " ".join(DIGITS[digit] for digit in rng.integers(len(DIGITS), size=rng.choice(lengths)))

    held: dict[str, None] = {}
    while len(held) < num_held:
        held[draw(HELD_LENGTHS)] = None
    train: list[str] = []
    while len(train) < num_train:
        row = draw(TRAIN_LENGTHS)
        if row not in held:
            train.append(row)
    return list(held), train


def sentence_texts(num_held: int, num_train: int, seed: int) -> tuple[list[str], list[str]]:
    """Sentences that training never says, each once, and others for training, again and again where there are fewer."""
    found = sentences(seed)
    if len(found) < 2 * num_held + 1:
        raise DataError(
            f"only {len(found)} plain sentences in the docstrings that are installed here, {2 * num_held + 1} are "
            f"needed; install {', '.join(PACKAGES)}, set dataset.sentences=digits, or pass --from your own speech",
            code="too-small",
        )
    held, train = found[:num_held], found[num_held:]
    return held, [train[number % len(train)] for number in range(num_train)]


def sentences(seed: int) -> list[str]:
    """All that can be found, in an order by the seed; what a further package brings does not change that of others."""
    return sorted(_sentences(), key=lambda sentence: key_of(seed, "sentence", sentence))


@functools.cache  # 1 MB; parsing takes 9 to 18 s on two shared cores
def _sentences() -> tuple[str, ...]:
    used_by: dict[str, set[str]] = {}
    found: dict[str, str] = {}  # by what is left of it without endings and commas: two that differ by an s are one
    for module, text in _texts():
        for sentence in in_text(text):
            words = re.findall(r"[a-z']+", sentence.lower())
            for word in words:
                used_by.setdefault(word, set()).add(module)
            found.setdefault(" ".join(word.rstrip("s") for word in words), sentence)
    known = {word for word, by in used_by.items() if len(by) >= FEWEST_MODULES}
    return tuple(sentence for sentence in found.values() if known.issuperset(re.findall(r"[a-z']+", sentence.lower())))


def in_text(text: str) -> Iterator[str]:
    """The plain sentences of a docstring: of FEWEST_WORDS to MOST_WORDS words, without anything to be spelled."""
    for paragraph in re.split(r"\n\s*\n", text):
        if ">>>" in paragraph or "::" in paragraph:
            continue
        # Where the indent changes, a parameter ends and what is said about it begins.
        for _, lines in itertools.groupby(paragraph.split("\n"), lambda line: len(line) - len(line.lstrip())):
            for sentence in _END.split(" ".join(" ".join(lines).split())):
                words = sentence.removesuffix(".").split(" ")
                if sentence.endswith(".") and FEWEST_WORDS <= len(words) <= MOST_WORDS and _is_plain(words):
                    yield sentence


def _is_plain(words: list[str]) -> bool:
    if not words[0][:1].isupper() or words[-1].endswith(","):
        return False
    for number, word in enumerate(word.removesuffix(",") for word in words):
        is_english = SHORT.fullmatch(word) if len(word) < 3 else not CODE.fullmatch(word.lower())
        if not _WORD.fullmatch(word) or not is_english or (word == "A" and number):  # A further on is a matrix
            return False
    return True


def _texts() -> Iterator[tuple[str, str]]:
    """Module and docstring, of all there are here, in an order of their own."""
    library = Path(sysconfig.get_path("stdlib"))
    places = [(path, path.name) for path in sorted(library.iterdir())
              if path.name not in NOT_LIBRARY and (path.is_dir() or path.suffix == ".py")]  # fmt: skip
    places += [(home / package, package) for package in PACKAGES if (home := home_of(package)) is not None]
    for root, name in places:
        for file, module in modules(root, name):
            try:
                tree = parse(file)
            except (OSError, SyntaxError, ValueError):
                continue  # examples of bad syntax, and files of others that nobody can read
            for _, text in docstrings(tree):
                yield module, text
    try:
        tree = parse(library / "pydoc_data" / "topics.py")
        assigned = next(node.value for node in tree.body if isinstance(node, ast.Assign))
        topics = ast.literal_eval(assigned)
        yield from ((f"topics/{name}", text) for name, text in topics.items() if isinstance(text, str))
    except (OSError, SyntaxError, ValueError, StopIteration, AttributeError):
        pass  # some systems leave it out
