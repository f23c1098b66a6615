"""The page of a survey: its figures in tables and pictures, for a reader who was not there.

What matters comes first: the findings, then the evidence in the order in which one would ask for it.
"""

from __future__ import annotations

from typing import Any

from rung.recipes.world.survey.alignment import LAGS, LEAST_R2, NOW, NUM_RESAMPLED
from rung.recipes.world.survey.findings import places_of
from rung.report import plot
from rung.report.blocks import Block, Heading, Page, Paragraph, Picture, Spans, Table, bold, code, link
from rung.report.chart import bar_chart, histograms, number
from rung.units import duration, percent, plural

MOST_CHANNELS = 4  # drawn in one chart

VERDICTS: dict[str, Spans] = {
    "aligned": ["The controls fit the frames: the curve peaks at lag 0."],
    "misaligned": [bold("The controls do not fit the frames"), ": the curve peaks elsewhere."],
    "unsure": [
        "The curve peaks elsewhere than at lag 0, but by too little, or in too few resampled films, to be sure."
    ],
    "unseen": ["No control can be read off the motion of the pictures."],
    "short": ["There are too few unbroken steps to tell."],
}


def summary(figures: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    frames, train = figures["frames"], figures["coverage"].get("train", {"ways": {}, "still": 0})
    ways = [f"{way} {percent(each['share'])}" for way, each in train["ways"].items()]
    ways.append(f"still {percent(train['still'])}")
    splits = ", ".join(f"{name} {each['frames']}" for name, each in figures["splits"].items())
    found = figures["alignment"]
    if found["overall"]:
        alignment = (
            f"{found['verdict']}: best at lag {found['lag']}, R2 {max(found['overall']):.2f}, "
            f"{percent(found['agreement'])} of resampled films agree, half-width {_width(found)}"
        )
    else:
        alignment = str(VERDICTS[found["verdict"]][0])
    findings = figures["findings"]
    lines = [
        f"{figures['store']}  {frames['frames']} frames of {figures['size'][0]}x{figures['size'][1]} ({splits}), "
        f"{figures['rate_hz']:.3g} Hz",
        f"ways       {', '.join(ways)}",
        f"alignment  {alignment}",
        f"frames     {len(frames['broken'])} broken, {len(frames['repeated'])} repeated although the controls move, "
        f"{len(frames['cuts'])} cuts",
        plural(len(findings), "finding") + (":" if findings else ""),
    ]
    for each in findings:
        lines += [f"{each['rule']}  {each['certainty']}  {each['text']}", f"  try  {each['remedy']}"]
    return "\n".join(lines)


def page(figures: dict[str, Any]) -> Page:
    about = (
        f"{figures['frames']['frames']} frames of {figures['size'][0]}x{figures['size'][1]}, "
        f"{figures['rate_hz']:.3g} Hz. Source: {figures['source'] or 'unknown'}. Fingerprint "
    )
    rows = [[[code(f["rule"])], f["certainty"], f["text"], f["remedy"]] for f in figures["findings"]]
    table = Table(["finding", "how sure", "what was seen", "what to try"], rows)
    file = link("report.json", "report.json")
    blocks = [
        Paragraph([about, code(figures["fingerprint"]), ". All figures are in ", file, "."]),
        Heading(2, ["Findings"]),
        table if rows else Paragraph(["None: nothing here stands in the way of training."]),
        *_directions(figures),
        *_alignment(figures["alignment"]),
        *_controls(figures),
        *_frames(figures),
        *_splits(figures),
    ]
    return Page(f"{figures['store']}: what the data is like", blocks)


def _directions(figures: dict[str, Any]) -> list[Block]:
    title, splits = Heading(2, ["Ways gone"]), figures["coverage"]
    if not splits:
        return [title, Paragraph(["No step has known controls."])]
    ways = [*next(iter(splits.values()))["ways"]]
    rows = []
    for way in ways:
        found = [each["ways"][way] for each in splits.values()]
        rows.append([way] + [f"{percent(each['share'])} ({number(each['total'])})" for each in found])
    rows.append(["still"] + [percent(each["still"]) for each in splits.values()])
    rows.append(["steps"] + [str(each["steps"]) for each in splits.values()])
    is_pose = figures["control_kind"] == "pose"
    unit = "lengths in units of the poses, angles in degrees" if is_pose else "in units of the control"
    shares = {
        name: [100 * share for share in (*(each["ways"][way]["share"] for way in ways), each["still"])]
        for name, each in splits.items()
    }
    text = (
        "A step goes some way when its control is more than a tenth of a brisk one; it can go several ways at once. In "
        f"brackets: how far in all, {unit}."
    )
    blocks: list[Block] = [
        title,
        Paragraph([text]),
        Table(["way", *splits], rows),
        Picture("directions.svg", "ways gone", bar_chart("Ways gone, % of the steps", [*ways, "still"], shares)),
    ]
    table = splits.get("train", {}).get("forward_by_turn")
    if table:
        rows = [[name, *map(percent, row)] for name, row in zip(("forward", "neither", "backward"), table)]
        blocks.append(Paragraph(["Going and turning together, in training:"]))
        blocks.append(Table(["", "turn left", "straight", "turn right"], rows))
    return blocks


def _alignment(found: dict[str, Any]) -> list[Block]:
    text = (
        "How the picture moves from frame to frame (sideways, down, growth, roll) is estimated from the pictures "
        "alone; then each control is read off that motion by least squares, with the controls shifted by some frames. "
        "R2 is the share of the controls that can be read. It should peak at lag 0."
    )
    blocks: list[Block] = [Heading(2, ["Controls against frames"]), Paragraph([text])]
    blocks.append(Paragraph(VERDICTS[found["verdict"]]))
    if not found["overall"]:
        return blocks
    lags = LAGS.tolist()
    places = [(lag, str(lag)) for lag in lags]
    x_name = "lag in frames (n: the picture follows n frames after its control)"
    mean = plot.Trace("", lags, found["overall"], low=found["low"], high=found["high"])
    title = "How well the controls can be read off the pictures: R2, 95 % bars"
    overall = plot.scatter_svg(plot.Scatter(title, x_name, [mean], places, has_zero=True))
    strongest = sorted(found["channels"], key=lambda name: -max(found["channels"][name]))[:MOST_CHANNELS]
    traces = [plot.Trace(name, lags, found["channels"][name]) for name in strongest]
    by_channel = plot.scatter_svg(plot.Scatter("The same by channel: R2", x_name, traces, places, has_zero=True))
    counts = {"": [sum(s["lag"] == lag for s in found["stretches"]) for lag in lags]}
    by_stretch = bar_chart("Best lag, number of stretches", [f"lag {lag}" for lag in lags], counts)

    seen = {name: list(curve) for name, curve in found["channels"].items() if max(curve) >= LEAST_R2}
    unseen = [name for name in found["channels"] if name not in seen]
    rows = [
        [name, str(LAGS[curve.index(max(curve))]), f"{max(curve):.3f}", f"{curve[NOW]:.3f}"]
        for name, curve in seen.items()
    ]
    gain = f", {percent(found['gain'])} above that at lag 0" if found["lag"] else ""
    text = (
        f"Best at lag {found['lag']} with R2 {max(found['overall']):.3f}{gain}; the same lag in "
        f"{percent(found['agreement'])} of {NUM_RESAMPLED} resampled films; half as high {_width(found)} away (wide "
        f"where controls are smooth). {found['num_rows']} steps."
    )
    blocks += [
        Paragraph([text]),
        Picture("alignment.svg", "R2 by lag", overall),
        Table(["control", "best lag", "R2 there", "R2 at lag 0"], rows),
    ]
    if unseen:
        text = f"Cannot be seen in the motion of the pictures (R2 below {LEAST_R2}): {', '.join(unseen)}."
        blocks.append(Paragraph([text]))
    blocks += [
        Picture("alignment-channels.svg", "R2 by lag and channel", by_channel),
        Paragraph(["The same for each stretch of the data alone: a stretch that disagrees has a clock of its own."]),
        Picture("alignment-stretches.svg", "best lag by stretch", by_stretch),
    ]
    odd: list[list[Spans | str]] = [
        [[code(s["label"])], str(s["start"]), str(s["length"]), str(s["lag"])]
        for s in found["stretches"]
        if s["is_odd"]
    ]
    if odd:
        blocks.append(Table(["odd stretch", "first row", "frames", "best lag"], odd))
    return blocks


def _width(found: dict[str, Any]) -> str:
    return f"{found['half_width']:.1f} frames" if found["half_width"] < len(LAGS) else f"more than {LAGS.max()} frames"


def _controls(figures: dict[str, Any]) -> list[Block]:
    keys = ("mean", "std", "min", "p1", "p50", "p99", "max")
    channels, timing = figures["channels"], figures["timing"]
    rows = [[name, *(number(c[key]) for key in keys), str(c["far_out"])] for name, c in channels.items()]
    blocks: list[Block] = [
        Heading(2, ["Controls"]),
        Paragraph(["Of the training steps; far out: more than 5 half-widths of the middle 98 % from the median."]),
        Table(["control", "mean", "std", "min", "1 %", "median", "99 %", "max", "far out"], rows),
    ]
    if rows:
        drawn = histograms("Controls in training, the middle 99.8 %", {n: c["histogram"] for n, c in channels.items()})
        blocks.append(Picture("controls.svg", "controls", drawn))
    if figures["constant"]:
        blocks.append(Paragraph([f"Always the same: {', '.join(figures['constant'])}."]))
    text = f"Steps without a known control (the first of each record has none): {figures['invalid']}."
    blocks.append(Paragraph([text]))
    if timing["steps"]:
        text = (
            f"Time between frames: median {1000 * timing['median_s']:.1f} ms, jitter {percent(timing['jitter'])}, "
            f"1 to 99 % {1000 * timing['p1_s']:.1f} to {1000 * timing['p99_s']:.1f} ms, longest "
            f"{timing['longest_s']:.3f} s; {timing['gaps']} gaps, {timing['backward']} steps without progress in time."
        )
        blocks.append(Paragraph([text]))
    return blocks


def _frames(figures: dict[str, Any]) -> list[Block]:
    found = figures["frames"]
    longest = found["longest_repeat"]
    rows = [
        ("nearly one colour", len(found["broken"]), found["broken"]),
        ("of these black", len(found["black"]), []),
        ("the same as the frame before, also when standing still", found["unchanged"], []),
        ("of these although the controls move", len(found["repeated"]), found["repeated"]),
        ("most of those in a row", longest["length"], [longest["row"]] if found["repeated"] else []),
        ("unlike the frames around", len(found["strays"]), found["strays"]),
        ("cuts inside an episode", len(found["cuts"]), found["cuts"]),
    ]
    cells: list[list[Spans | str]] = [
        [name, str(count), [code(places_of(figures, where, 10))]] for name, count, where in rows
    ]
    return [Heading(2, ["Frames"]), Table(["", "frames", "where"], cells)]


def _splits(figures: dict[str, Any]) -> list[Block]:
    rows = []
    for name, each in figures["splits"].items():
        base = figures["baselines"].get(name, {})
        losses = [f"{base[key]:.4f}" if key in base else "" for key in ("persistence", "mean_frame")]
        counts = map(str, (each["records"], len(each["episodes"]), each["frames"]))
        rows.append([name, *counts, duration(each["seconds"]), *losses])
    nearest: Spans = ["No episode is in more than one split."]
    if near := figures["nearest"]:
        text = f"Nearest in time: {' and '.join(near['splits'])}, {near['seconds']:.2f} s apart, in "
        nearest = [text, code(near["label"]), "."]
    dropped = "; ".join(f"{reason}: {count}" for reason, count in figures["dropped"].items())
    text = (
        "The last two columns are losses (L1 in [-1, 1]) of models that cost nothing: copying the last frame, and the "
        "mean of the training frames."
    )
    return [
        Heading(2, ["Splits and baselines"]),
        Paragraph([text]),
        Table(["split", "records", "episodes", "frames", "length", "copy the last", "mean frame"], rows),
        Paragraph(nearest),
        Paragraph([f"Left out when the data was prepared: {dropped}." if dropped else "Nothing was left out."]),
    ]
