"""What looks like a secret, and is therefore kept out of runs: files by name, settings by name, passwords in URLs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
_FILES = (
    "*.env", ".env.*", ".envrc", "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", ".netrc",
    "_netrc", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials.*", ".git-credentials",
    ".pypirc", ".npmrc", ".pgpass", ".htpasswd", ".s3cfg", ".boto", ".dockercfg", ".my.cnf", "kubeconfig",
    "secrets.*", "service[-_]account*.json", "client_secret*.json", "*[-_]secrets.*", "*_credentials.*",
)  # fmt: skip
_CODE = (".py", ".pyi", ".md", ".rst")  # secrets.py is code about secrets
_FOLDERS = {".aws", ".ssh", ".gnupg", ".kube", ".docker", ".azure", ".gcloud"}
_NAME = re.compile(
    r"token|(.*[_.-])?(api[_-]?key|password|passwd|passphrase|secret|secret[_-]?key|secret[_-]?access[_-]?key|credentials?"
    r"|private[_-]?key|access[_-]?key([_-]?id)?|connection[_-]?string|(openai|anthropic|wandb|hf|aws|azure|gcp|google)"
    r"[_-]?key|(access|auth|hub|hf|huggingface|github|bearer|wandb|api|refresh|login|session|secret)[_-]?token)",
    re.I,
)  # pad_token is none
_PASSWORD = re.compile(r"\b([a-z][a-z0-9+.-]*://[^\s/:@?#]*):[^\s/@]+@", re.I)


def is_secret_file(path: str) -> bool:
    """Whether a file, by its name or a folder it lies in, is one that people keep their keys in."""
    *folders, name = path.lower().split("/")
    is_named = any(fnmatch.fnmatchcase(name, pattern) for pattern in _FILES) and not name.endswith(_CODE)
    return is_named or not _FOLDERS.isdisjoint(folders)


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret."""
    return _NAME.fullmatch(name) is not None


def without_passwords(text: str) -> str:
    """The text with the password of each URL hidden: user:password@host."""
    return _PASSWORD.sub(rf"\1:{HIDDEN}@", text)


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what looks like a secret hidden."""
    return {name: _without(name, value) for name, value in tree.items()}


def _without(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, str):
        return HIDDEN if value and is_secret_name(name) else without_passwords(value)
    if isinstance(value, list | tuple):
        return [_without(name, one) for one in value]
    return value


def command_without_secrets(words: Sequence[str]) -> list[str]:
    """A command line whose secrets are hidden, in `--hub_token=x`, `hub_token=x` and `--hub_token x`."""
    shown: list[str] = []
    is_next = False
    for word in words:
        name, equals, value = word.partition("=")
        is_named = is_secret_name(name.lstrip("-"))
        if is_next and not word.startswith("-"):
            word = HIDDEN
        elif is_named and equals and value:
            word = f"{name}={HIDDEN}"
        is_next = is_named and not equals and word.startswith("-")
        shown.append(without_passwords(word))
    return shown
