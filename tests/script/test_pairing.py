"""If this fails, the norm of one update stands in the row of another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rung.script.step_axis import Pairing, Update


def play(num_updates: int, every: int, row_first: bool, first: int, stride: int = 1) -> dict[int, int]:
    """A loop that logs every so many updates; step of a row -> which update stands in it."""
    pairing, found = Pairing(), {}

    def row(number: int) -> None:
        own, mine = pairing.rows(first + number * stride)
        found.update({at: update.values["number"] for at, update in own})
        if mine.values:
            found[first + number * stride] = mine.values["number"]

    for number in range(num_updates):
        if row_first and number % every == 0:
            row(number)
        pairing.add(Update({"number": number}))
        if not row_first and number % every == every - 1:
            row(number)
    found.update({at: update.values["number"] for at, update in pairing.rest()})
    return found


@given(st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_each_update_has_the_number_that_the_script_gives_it(num_updates: int, every: int, row_first: bool) -> None:
    found = play(num_updates, every, row_first, first=0)
    assert all(step == number for step, number in found.items())
    rows = num_updates // every
    if not row_first:
        assert len(found) == rows * every  # also those between the rows


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 1000))
def test_a_loop_that_begins_elsewhere_is_followed(num_updates: int, every: int, first: int) -> None:
    found = play(num_updates, every, row_first=False, first=first)
    assert all(step == first + number for step, number in found.items())


def test_where_numbers_do_not_agree_the_row_has_the_last_update() -> None:
    """Steps count micros, four to an update, and only every third update is logged: nothing in between is made up."""
    found = play(12, 3, row_first=False, first=0, stride=4)
    assert found == {8: 2, 20: 5, 32: 8, 44: 11}
