"""What to make of the figures of a store: findings, by a few stated limits.

A finding says what was seen, how sure that is, and what to try. The figures are those of survey.measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rung.recipes.world.survey.alignment import LAGS, NOW
from rung.recipes.world.survey.figures import LONG
from rung.units import percent, plural

RARE = 0.1  # of the opposite way
STILL = 0.01  # of the steps
NEAR = 32  # frames between splits: nearer ones show much the same


class Finding(NamedTuple):
    rule: str
    certainty: str  # sure, likely, perhaps
    text: str
    remedy: str


def judge(figures: dict[str, Any]) -> Iterator[Finding]:
    """What a person should know, the worst first."""
    yield from _judge_alignment(figures)
    yield from _judge_frames(figures)
    yield from _judge_controls(figures)
    yield from _judge_splits(figures)


def place_of(figures: dict[str, Any], row: int) -> str:
    """A row of the store as the label of its record and the frame in it."""
    for record in figures["records"]:
        if record["start"] <= row < record["start"] + record["length"]:
            return f"{record['label']} frame {row - record['start']}"
    return f"row {row}"


def places_of(figures: dict[str, Any], rows: list[int], most: int = 5) -> str:
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return ", ".join(place_of(figures, row) for row in rows[:most]) + more


def _judge_alignment(figures: dict[str, Any]) -> Iterator[Finding]:
    found, rate = figures["alignment"], figures["rate_hz"]
    verdict, lag, stretches = found["verdict"], found["lag"], found["stretches"]
    if verdict == "short":
        text = f"Only {found['num_rows']} steps can be used to compare controls with frames."
        yield Finding("alignment-unknown", "sure", text, "record longer stretches without a break")
    if verdict == "unseen":
        text = f"No control can be read off the motion of the pictures, at any lag from {LAGS[0]} to {LAGS[-1]}."
        remedy = "check that the controls belong to these frames; if what they do is not a camera's motion, ignore this"
        yield Finding("controls-unseen", "likely", text, remedy)
    if verdict in ("misaligned", "unsure"):
        edge = " or more" if abs(lag) == LAGS.max() else ""
        text = (
            f"The pictures follow their controls {abs(lag)}{edge} frame{'s' if abs(lag) > 1 else ''} "
            f"({abs(lag) / rate:.3f} s) too {'late' if lag > 0 else 'early'}: R2 is {max(found['overall']):.2f} at lag "
            f"{lag}, {found['overall'][NOW]:.2f} at lag 0; {percent(found['agreement'])} of resampled films agree."
        )
        configured = figures["control_lag"]
        if figures["control_kind"] == "pose":
            remedy = f"add {lag / rate:+.3f} s to the times of the poses and prepare the data again"
        elif configured is None:
            remedy = f"move the controls by {lag:+d} frames and prepare the data again"
        elif configured + lag < 0:
            remedy = f"move the controls by {lag:+d} frames in the source; dataset.control_lag cannot go below 0"
        else:
            remedy = f"prepare the data again with dataset.control_lag={configured + lag} (it is {configured})"
        yield Finding("misaligned", "sure" if verdict == "misaligned" else "perhaps", text, remedy)
    odd = [stretch for stretch in stretches if stretch["is_odd"]]
    if odd:
        named = [f"{place_of(figures, s['start'])} on, {s['length']} frames: lag {s['lag']}" for s in odd[:5]]
        more = f"; and {len(odd) - 5} more" if len(odd) > 5 else ""
        text = (
            f"{len(odd)} of {len(stretches)} stretches fit best at another lag than the rest: {'; '.join(named)}{more}."
        )
        yield Finding("odd-stretches", "likely", text, "look at the clocks of these recordings, or leave them out")


def _judge_frames(figures: dict[str, Any]) -> Iterator[Finding]:
    found = figures["frames"]
    broken, repeated, strays, cuts = (found[name] for name in ("broken", "repeated", "strays", "cuts"))
    if broken:
        text = f"{plural(len(broken), 'frame')} of nearly one colour ({len(found['black'])} black): "
        text += f"{places_of(figures, broken)}."
        yield Finding("broken-frames", "sure", text, "cut them out of the source")
    if repeated:
        share, longest = len(repeated) / max(1, found["moved"]), found["longest_repeat"]
        text = (
            f"{plural(len(repeated), 'frame')} ({percent(share)} of the steps that move) the same as the one before "
            f"although the controls move; at most {longest['length']} in a row, at "
            f"{place_of(figures, longest['row'])}; first {places_of(figures, repeated, 3)}."
        )
        remedy = "drop repeated frames, or prepare with dataset.every=2 if the source repeats each one"
        yield Finding("repeated-frames", "sure" if share > 0.01 else "likely", text, remedy)
    if strays:
        text = f"{plural(len(strays), 'frame')} unlike those around: {places_of(figures, strays)}."
        yield Finding("stray-frames", "likely", text, "cut them out of the source")
    if cuts:
        text = f"{plural(len(cuts), 'cut')} inside an episode: {places_of(figures, cuts)}."
        yield Finding("cuts", "likely", text, "split the episodes there, so that no control bridges a cut")


def _judge_controls(figures: dict[str, Any]) -> Iterator[Finding]:
    train, timing = figures["coverage"].get("train"), figures["timing"]
    if train is None:
        yield Finding("controls-unknown", "sure", "No training step has known controls.", "check poses and times")
    else:
        for pair in figures["pairs"]:
            rare, common = sorted(pair, key=lambda way: train["ways"][way]["share"])
            low, high = train["ways"][rare]["share"], train["ways"][common]["share"]
            if high > 0.01 and low < RARE * high:
                text = f"{rare} is {percent(low)} of the steps, {common} {percent(high)}: the model hardly learns it."
                yield Finding("one-way", "sure", text, f"record more of it, or do not expect {rare} to work")
        if train["ways"] and train["still"] < STILL:
            share = percent(train["still"])
            text = f"The camera stands still in {share} of the steps: doing nothing is new to the model."
            yield Finding("never-still", "sure", text, "record some standing still")
        never = [name for name in figures["constant"] if name not in ("valid", "dt")]
        if never:
            text = f"Always the same in training, so nothing can be learned from it: {', '.join(never)}."
            yield Finding("constant-controls", "sure", text, "vary it while recording, or expect nothing of it")
    wild = {name: c for name, c in figures["channels"].items() if c["far_out"] and name in figures["moving"]}
    if wild:
        named = [f"{n} ({c['far_out']}, first at {place_of(figures, c['far_out_rows'][0])})" for n, c in wild.items()]
        text = f"Controls far outside of what is usual: {', '.join(named)}."
        yield Finding("wild-controls", "likely", text, "look at these frames: lost tracking jumps like this")
    if timing.get("gaps"):
        text = (
            f"{timing['gaps']} gaps in time of more than {LONG} frames inside records, the longest "
            f"{timing['longest_s']:.2f} s: {places_of(figures, timing['gap_rows'], 3)}."
        )
        yield Finding("gaps", "sure", text, "lower dataset.episode_gap, so that a gap ends an episode")
    if timing.get("backward"):
        text = (
            f"Time does not advance at {timing['backward']} frames: {places_of(figures, timing['backward_rows'], 3)}."
        )
        yield Finding("time-backward", "sure", text, "sort the source by time")


def _judge_splits(figures: dict[str, Any]) -> Iterator[Finding]:
    nearest = figures["nearest"]
    if nearest and nearest["seconds"] * figures["rate_hz"] < NEAR:
        text = (
            f"{' and '.join(nearest['splits'])} are only {nearest['seconds']:.2f} s apart in {nearest['label']}: "
            "what is held out looks much like what is trained on."
        )
        yield Finding("splits-near", "sure", text, "raise dataset.split_gap")
    for each in figures["differs"]:
        text = (
            f"{each['channel']} differs in {each['split']}: its mean by {each['shift']:+.1f} of the training spread, "
            f"its spread by a factor of {each['ratio']:.2f}."
        )
        yield Finding("splits-differ", "likely", text, "hold out other stretches, or more of them")
    if list(figures["splits"]) == ["train"]:
        yield Finding("no-held-out", "sure", "Nothing is held out to evaluate on.", "set dataset.validation above 0")
