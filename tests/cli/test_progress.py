"""If this fails, somebody looks at an empty screen and does not know why."""

from __future__ import annotations

import time

import pytest

from rung.progress import patience


def test_a_long_wait_is_explained_and_a_short_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with patience("soon", after_s=3600):
        pass
    assert capsys.readouterr().err == ""
    said, deadline = "", time.monotonic() + 30
    with patience("building", after_s=0):
        while not said.endswith("\n") and time.monotonic() < deadline:
            said += capsys.readouterr().err
    assert said == "building\n"
