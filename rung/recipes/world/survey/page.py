"""The page of a survey: its figures in tables and pictures, for a reader who was not there.

What matters comes first: the findings, then the evidence in the order in which one would ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rung.recipes.world.survey.alignment import LAGS, LEAST_R2, NOW, NUM_RESAMPLED
from rung.recipes.world.survey.charts import Histogram, Series, bar_chart, histograms, line_chart, number
from rung.recipes.world.survey.findings import percent, places_of
from rung.units import duration

MOST_CHANNELS = 4  # drawn in one chart

VERDICTS = {
    "aligned": "The controls fit the frames: the curve peaks at lag 0.",
    "misaligned": "**The controls do not fit the frames**: the curve peaks elsewhere.",
    "unsure": "The curve peaks elsewhere than at lag 0, but by too little, or in too few resampled films, to be sure.",
    "unseen": "No control can be read off the motion of the pictures.",
    "short": "There are too few unbroken steps to tell.",
}


def summary(figures: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    frames, train = figures["frames"], figures["coverage"].get("train", {"ways": {}, "still": 0})
    ways = [f"{way} {percent(each['share'])}" for way, each in train["ways"].items()]
    still = f"still {percent(train['still'])}"
    splits = ", ".join(f"{name} {each['frames']}" for name, each in figures["splits"].items())
    lines = [
        f"{figures['store']}  {frames['frames']} frames of {figures['size'][0]}x{figures['size'][1]} ({splits}), "
        f"{figures['rate_hz']:.3g} Hz",
        f"ways       {', '.join([*ways, still])}",
        f"alignment  {_alignment_line(figures['alignment'])}",
        f"frames     {len(frames['broken'])} broken, {len(frames['repeated'])} repeated although the controls move, "
        f"{len(frames['cuts'])} cuts",
    ]
    found = figures["findings"]
    lines.append(f"{len(found)} finding{'s' if len(found) != 1 else ''}" + (":" if found else ""))
    for each in found:
        lines += [f"{each['rule']}  {each['certainty']}  {each['text']}", f"  try  {each['remedy']}"]
    return "\n".join(lines)


def _alignment_line(found: dict[str, Any]) -> str:
    if found["verdict"] in ("short", "unseen"):
        return VERDICTS[found["verdict"]]
    return (
        f"{found['verdict']}: best at lag {found['lag']}, R2 {max(found['overall']):.2f}, "
        f"{percent(found['agreement'])} of resampled films agree, half-width {_width(found)}"
    )


def _width(found: dict[str, Any]) -> str:
    return f"{found['half_width']:.1f} frames" if found["half_width"] < len(LAGS) else f"more than {LAGS.max()} frames"


def pictures(figures: dict[str, Any]) -> dict[str, str]:
    """File name to SVG text."""
    drawn = {}
    splits = figures["coverage"]
    if splits:
        ways = [*next(iter(splits.values()))["ways"], "still"]
        groups = [
            Series(name, [100 * (each["ways"][way]["share"] if way != "still" else each["still"]) for way in ways])
            for name, each in splits.items()
        ]
        drawn["directions.svg"] = bar_chart("Ways gone", ways, groups, "% of the steps")
    charts = [
        Histogram(name, c["histogram"]["counts"], c["histogram"]["edges"]) for name, c in figures["channels"].items()
    ]
    if charts:
        drawn["controls.svg"] = histograms("Controls in training, the middle 99.8 %", charts)
    found = figures["alignment"]
    if found["overall"]:
        band = [Series("mean", found["overall"], found["low"], found["high"])]
        label = "lag in frames (n: the picture follows n frames after its control)"
        title = "How well the controls can be read off the pictures"
        drawn["alignment.svg"] = line_chart(title, LAGS.tolist(), band, label, "R2 (95 % band)")
        each = [Series(name, found["channels"][name]) for name in _strongest(found)]
        drawn["alignment-channels.svg"] = line_chart("The same by channel", LAGS.tolist(), each, label, "R2")
        counts = [sum(s["lag"] == lag for s in found["stretches"]) for lag in LAGS]
        labels = [f"lag {lag}" for lag in LAGS]
        stretches = [Series("stretches", counts)]
        drawn["alignment-stretches.svg"] = bar_chart("Best lag, stretch by stretch", labels, stretches, "stretches")
    return drawn


def _strongest(found: dict[str, Any]) -> list[str]:
    return sorted(found["channels"], key=lambda name: -max(found["channels"][name]))[:MOST_CHANNELS]


def page(figures: dict[str, Any], drawn: Sequence[str]) -> str:
    parts = [
        f"# {figures['store']}: what the data is like",
        f"{figures['frames']['frames']} frames of {figures['size'][0]}x{figures['size'][1]}, "
        f"{figures['rate_hz']:.3g} Hz. Source: {figures['source'] or 'not said'}. Fingerprint "
        f"`{figures['fingerprint']}`. All figures are in [report.json](report.json).",
        _findings(figures),
        _directions(figures),
        _alignment(figures),
        _controls(figures),
        _frames(figures),
        _splits(figures),
    ]
    text = "\n\n".join(parts) + "\n"
    for name in drawn:
        assert f"({name})" in text, f"{name} is drawn and not shown"
    return text


def _findings(figures: dict[str, Any]) -> str:
    if not figures["findings"]:
        return "## Findings\n\nNone: nothing here stands in the way of training."
    rows = [[f"`{f['rule']}`", f["certainty"], f["text"], f["remedy"]] for f in figures["findings"]]
    return "## Findings\n\n" + _table(["finding", "how sure", "what was seen", "what to try"], rows)


def _directions(figures: dict[str, Any]) -> str:
    if not figures["coverage"]:
        return "## Ways gone\n\nNo step has known controls."
    splits = figures["coverage"]
    ways = [*next(iter(splits.values()))["ways"]]
    rows = []
    for way in ways:
        cells = [(splits[name]["ways"][way]["share"], splits[name]["ways"][way]["total"]) for name in splits]
        rows.append([way] + [f"{percent(share)} ({number(total)})" for share, total in cells])
    rows.append(["still"] + [f"{percent(splits[name]['still'])}" for name in splits])
    rows.append(["steps"] + [str(splits[name]["steps"]) for name in splits])
    is_pose = figures["control_kind"] == "pose"
    unit = "lengths in units of the poses, angles in degrees" if is_pose else "in units of the control"
    parts = [
        "## Ways gone",
        "A step goes some way when its control is more than a tenth of a brisk one; it can go several ways at once. In "
        f"brackets: how far in all, {unit}.",
        _table(["way", *splits], rows),
        "![ways gone](directions.svg)",
    ]
    table = splits.get("train", {}).get("forward_by_turn")
    if table:
        names = ("forward", "neither", "backward")
        shares = [[name, *(f"{percent(share)}" for share in row)] for name, row in zip(names, table)]
        parts += [
            "Going and turning together, in training:",
            _table(["", "turn left", "straight", "turn right"], shares),
        ]
    return "\n\n".join(parts)


def _alignment(figures: dict[str, Any]) -> str:
    found = figures["alignment"]
    parts = [
        "## Controls against frames",
        "How the picture moves from frame to frame (sideways, down, growth, roll) is estimated from the pictures "
        "alone; then each control is read off that motion by least squares, with the controls shifted by some frames. "
        "R2 is the share of the controls that can be read. It should peak at lag 0.",
        VERDICTS[found["verdict"]],
    ]
    if not found["overall"]:
        return "\n\n".join(parts)
    seen = [name for name, curve in found["channels"].items() if max(curve) >= LEAST_R2]
    unseen = [name for name in found["channels"] if name not in seen]
    rows = [
        [name, str(LAGS[curve.index(max(curve))]), f"{max(curve):.3f}", f"{curve[NOW]:.3f}"]
        for name, curve in ((name, list(found["channels"][name])) for name in seen)
    ]
    gain = f", {percent(found['gain'])} above that at lag 0" if found["lag"] else ""
    parts += [
        f"Best at lag {found['lag']} with R2 {max(found['overall']):.3f}{gain}; the same lag in "
        f"{percent(found['agreement'])} of {NUM_RESAMPLED} resampled films; half as high {_width(found)} away (wide "
        f"where controls are smooth). {found['num_rows']} steps.",
        "![R2 by lag](alignment.svg)",
        _table(["control", "best lag", "R2 there", "R2 at lag 0"], rows),
        f"Cannot be seen in the motion of the pictures (R2 below {LEAST_R2}): {', '.join(unseen)}." if unseen else "",
        "![R2 by lag and channel](alignment-channels.svg)",
        "The same for each stretch of the data by itself: a stretch that disagrees has a clock of its own.",
        "![best lag by stretch](alignment-stretches.svg)",
    ]
    odd = [s for s in found["stretches"] if s["is_odd"]]
    if odd:
        cells = [[_code(s["label"]), str(s["start"]), str(s["length"]), str(s["lag"])] for s in odd]
        parts.append(_table(["odd stretch", "first row", "frames", "best lag"], cells))
    return "\n\n".join(part for part in parts if part)


def _controls(figures: dict[str, Any]) -> str:
    keys = ("mean", "std", "min", "p1", "p50", "p99", "max")
    rows = [[name, *(number(c[key]) for key in keys), str(c["far_out"])] for name, c in figures["channels"].items()]
    timing = figures["timing"]
    parts = [
        "## Controls",
        "Of the training steps; far out: more than 5 half-widths of the middle 98 % from the median.",
    ]
    parts.append(_table(["control", "mean", "std", "min", "1 %", "median", "99 %", "max", "far out"], rows))
    if rows:
        parts.append("![controls](controls.svg)")
    if figures["constant"]:
        parts.append(f"Always the same: {', '.join(figures['constant'])}.")
    parts.append(f"Steps without a known control (the first of each record has none): {figures['invalid']}.")
    if timing["steps"]:
        parts.append(
            f"Time between frames: median {1000 * timing['median_s']:.1f} ms, jitter {percent(timing['jitter'])}, "
            f"1 to 99 % {1000 * timing['p1_s']:.1f} to {1000 * timing['p99_s']:.1f} ms, longest "
            f"{timing['longest_s']:.3f} s; {timing['gaps']} gaps, {timing['backward']} steps that do not go on in time."
        )
    return "\n\n".join(parts)


def _frames(figures: dict[str, Any]) -> str:
    found = figures["frames"]
    repeated, longest = len(found["repeated"]), found["longest_repeat"]
    rows = [
        ["nearly one colour", str(len(found["broken"])), places_of(figures, found["broken"], 10)],
        ["of these black", str(len(found["black"])), ""],
        ["the same as the frame before, also when standing still", str(found["unchanged"]), ""],
        ["of these although the controls move", str(repeated), places_of(figures, found["repeated"], 10)],
        ["most of those in a row", str(longest["length"]), places_of(figures, [longest["row"]]) if repeated else ""],
        ["unlike the frames around", str(len(found["strays"])), places_of(figures, found["strays"], 10)],
        ["cuts inside an episode", str(len(found["cuts"])), places_of(figures, found["cuts"], 10)],
    ]
    return "## Frames\n\n" + _table(["", "frames", "where"], [[a, b, _code(c)] for a, b, c in rows])


def _splits(figures: dict[str, Any]) -> str:
    rows = []
    for name, each in figures["splits"].items():
        base = figures["baselines"].get(name, {})
        cells = [f"{base[key]:.4f}" if key in base else "" for key in ("persistence", "mean_frame")]
        length = duration(each["seconds"])
        rows.append([name, str(each["records"]), str(len(each["episodes"])), str(each["frames"]), length, *cells])
    nearest = figures["nearest"]
    dropped = [f"{reason}: {count}" for reason, count in figures["dropped"].items()]
    parts = [
        "## Splits and baselines",
        "The last two columns are losses (L1 in [-1, 1]) of models that cost nothing: copying the last frame, and the "
        "mean of the training frames.",
        _table(["split", "records", "episodes", "frames", "length", "copy the last", "mean frame"], rows),
        f"Nearest in time: {' and '.join(nearest['splits'])}, {nearest['seconds']:.2f} s apart, in "
        f"{_code(nearest['label'])}."
        if nearest
        else "No episode is in more than one split.",
        f"Left out when the data was prepared: {'; '.join(dropped)}." if dropped else "Nothing was left out.",
    ]
    return "\n\n".join(parts)


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`" if text else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as GitHub draws it; a bar inside a cell would end the cell."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines
    )
