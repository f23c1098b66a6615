"""How tests speak of a user's mistake: by its code, so that a sentence can be improved in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rung.errors import UserError


@contextmanager
def raises_code(code: str, kind: type[UserError] = UserError) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """`with raises_code("no-run"):` passes when a UserError of that code is raised; yields what pytest.raises does."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"code {caught.value.code!r}: {caught.value}"
