"""What prepared music is like, and what the codec makes of it: `rung data music --report`.

Figures come from the store alone. What the codec keeps can be heard: excerpts of held-out records are decoded from
their codes with one, two, four and so on codebooks, beside the original where it can still be read.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rung.data.audio import MOST_DC, spectrogram_png, wav_bytes
from rung.data.store import Store, write_report
from rung.errors import DataError
from rung.recipe import Report
from rung.recipes.music.data import audible_frame
from rung.recipes.music.sources import SPLITS
from rung.recipes.music.spectra import log_mel_distance, si_sdr
from rung.report.blocks import Block, File, Heading, Page, Paragraph, Picture, Spans, Table, code, link, markdown
from rung.report.chart import bar_chart, histograms, number
from rung.report.html import to_html
from rung.units import count, duration, percent, plural

NUM_EXCERPTS, EXCERPT_S = 3, 6.0
NUM_TAGS, MOST_LISTED = 20, 30
SILENT_DB = -50.0  # rms of a record that is hardly more than silence
SHORT_S = 3.0  # a shorter record ends before a phrase does
RARE, COMMON = 0.1, 0.5  # share of a codebook that is used; of frames that have one code
ROWS = 1 << 16  # of codes that are counted together


class Codec(Protocol):
    sample_rate: int
    hop: int  # samples of a frame
    num_codebooks: int
    codebook_size: int

    def decode(self, codes_TC: np.ndarray) -> np.ndarray: ...  # with fewer codebooks than all: the first ones


Original = Callable[[dict[str, Any]], np.ndarray | None]  # record -> its sound at the codec's rate, if it can be read


class Finding(NamedTuple):
    rule: str
    certainty: str  # sure, likely, perhaps
    text: str
    remedy: str


def survey(store: Store, codec: Codec, out: Path, report: Report, original: Original | None = None) -> str:
    """Writes report.md, .html, .json, pictures and sounds into `out`, in place of what was there; returns a summary."""
    figures = measure(store, codec, report)
    figures["excerpts"], sounds = _excerpts(store, codec, report, original)
    figures["findings"] = [finding._asdict() for finding in judge(figures)]
    shown = page(figures, sounds)
    files = {"report.md": markdown(shown), "report.html": to_html(shown)} | shown.drawings
    files["report.json"] = json.dumps(figures, indent=1) + "\n"
    write_report(out, {name: text.encode() for name, text in files.items()} | sounds)
    return summary(figures)


# Figures


def measure(store: Store, codec: Codec, report: Report) -> dict[str, Any]:
    """All figures of a store, as plain data."""
    if not len(store.arrays["codes"]) or "train" not in store.splits:
        raise DataError(
            f"{store.path} has no training music to report on; prepare it again with more data", code="no-data"
        )
    info = store.info
    splits = {split: [store.index[k] for k in store.split(split)] for split in SPLITS if split in store.splits}
    train = splits["train"]
    seconds = np.array([record["seconds"] for record in train])
    rms_db, peak_db = (np.array([record[key] for record in train]) for key in ("rms_db", "peak_db"))
    texts = [str(record.get("text") or "") for record in train]
    tags = Counter(tag.strip().lower() for text in texts for tag in text.replace(";", ",").split(",") if tag.strip())
    lengths = np.array([len(text.encode()) for text in texts if text])
    by_piece = Counter[str]()
    for record in train:
        by_piece[record["piece"]] += record["seconds"]
    [(largest, largest_s)] = by_piece.most_common(1)
    num_channels = store.arrays["codes"].shape[1]
    frames_per_s = codec.sample_rate / codec.hop
    return {
        "store": store.path.name,
        "fingerprint": store.fingerprint,
        "summary": info.get("summary", ""),
        "codec": {**info["codec"], "frames_per_s": frames_per_s},
        "stereo": bool(info.get("stereo")),
        "bits_per_s": frames_per_s * num_channels * math.log2(codec.codebook_size),
        "splits": {
            split: {
                "records": len(records),
                "pieces": len({record["piece"] for record in records}),
                "tracks": len({record["source"] for record in records}),
                "frames": sum(record["length"] for record in records),
                "seconds": sum(record["seconds"] for record in records),
            }
            for split, records in splits.items()
        },
        "levels": {
            "peak_db": _distribution(peak_db),
            "rms_db": _distribution(rms_db),
            "silent_share": float(seconds[rms_db < SILENT_DB].sum() / max(seconds.sum(), 1e-9)),
            "clipped": [record["source"] for record in train if record.get("clipped_share", 0) > 0.001],
            "dc": [record["source"] for record in train if record.get("dc_offset", 0) > MOST_DC],
            "channels": dict(Counter(str(record.get("channels", 1)) for record in train)),
        },
        "durations": {**_distribution(seconds), "short": int((seconds < SHORT_S).sum())},
        "largest_piece": {"piece": largest, "seconds": largest_s, "share": largest_s / max(seconds.sum(), 1e-9)},
        "captions": {
            "with": len(lengths),
            "distinct": len({text for text in texts if text}),
            "bytes": _distribution(lengths) if len(lengths) else None,
            "tags": tags.most_common(NUM_TAGS),
        },
        "quarantined": list(info.get("quarantined", [])),
        "remarks": list(info.get("remarks", [])),
        "books": {split: _book_figures(store, split, codec.codebook_size, report) for split in splits},
    }


def _distribution(values: np.ndarray) -> dict[str, Any]:
    low, p5, median, p95, high = (float(value) for value in np.percentile(values, [0, 5, 50, 95, 100]))
    counts, edges = np.histogram(values, bins=24, range=(low, high) if high > low else (low - 0.5, high + 0.5))
    return {
        "min": low, "p5": p5, "median": median, "p95": p95, "max": high,
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }  # fmt: skip


def _book_figures(store: Store, split: str, size: int, report: Report) -> list[dict[str, Any]]:
    """How the codes of each codebook are used in a split."""
    codes = store.arrays["codes"]
    histogram = np.zeros((codes.shape[1], size), np.int64)
    records = store.split(split)
    for done, k in enumerate(records):
        report(f"counting codes of {split}", done, len(records))
        start, end = int(store.starts[k]), int(store.starts[k] + store.lengths[k])
        for at in range(start, end, ROWS):
            block = np.asarray(codes[at : min(at + ROWS, end)])
            if block.size and int(block.max()) >= size:
                raise DataError(
                    f"{store.path} has code {int(block.max())}, but the codebooks have {size}; prepare it with this "
                    "codec",
                    code="data-mismatch",
                )
            for channel in range(codes.shape[1]):
                histogram[channel] += np.bincount(block[:, channel], minlength=size)
    report(f"counting codes of {split}", len(records), len(records))
    found = []
    for counts in histogram:
        total = max(int(counts.sum()), 1)
        shares = counts[counts > 0] / total
        found.append({
            "distinct": len(shares),
            "used_share": len(shares) / size,
            "perplexity": float(np.exp(-(shares * np.log(shares)).sum())),
            "most_frequent": float(shares.max(initial=0.0)),
        })  # fmt: skip
    return found


# Listening


def _excerpts(
    store: Store, codec: Codec, report: Report, original: Original | None
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What there is to hear, and its files: excerpts of held-out records of different pieces."""
    held_out = [int(k) for split in ("validation", "test") if split in store.splits for k in store.split(split)]
    by_piece: dict[str, int] = {}  # the longest record of each
    for k in held_out or map(int, store.split("train")):
        piece = store.index[k]["piece"]
        if piece not in by_piece or store.lengths[k] > store.lengths[by_piece[piece]]:
            by_piece[piece] = k
    records = [*by_piece.values()]
    chosen = [
        records[i] for i in sorted({*np.linspace(0, len(records) - 1, NUM_EXCERPTS).round().astype(int).tolist()})
    ]
    num_books = codec.num_codebooks
    levels = sorted({min(1 << k, num_books) for k in range(num_books.bit_length() + 1)})
    rate, files, found = codec.sample_rate, dict[str, bytes](), []

    for position, k in enumerate(chosen):
        report("decoding excerpts", position, len(chosen))
        record = store.index[k]
        length = min(record["length"], max(1, round(EXCERPT_S * rate / codec.hop)))
        first = (record["length"] - length) // 2
        reference = original(record) if original is not None else None
        if reference is not None:  # the middle, or where there is something to hear near it
            reference = np.asarray(reference, np.float32).reshape(len(reference), -1)
            first = min(
                audible_frame(np.abs(reference).max(axis=1), codec.hop, length, first), record["length"] - length
            )
            reference = reference[first * codec.hop : (first + length) * codec.hop]
        codes = np.asarray(store.arrays["codes"][record["start"] + first : record["start"] + first + length])
        sides = np.split(codes, codes.shape[1] // num_books, axis=1)  # left and right, or one
        name = f"excerpt{position + 1}"
        excerpt: dict[str, Any] = {
            "source": record["source"], "piece": record["piece"], "split": record["split"],
            "text": record.get("text") or "", "start_s": round(first * codec.hop / rate, 3),
            "seconds": round(length * codec.hop / rate, 3), "original": None, "books": [],
        }  # fmt: skip
        if reference is not None and len(reference):
            files[f"{name}-original.wav"] = wav_bytes(reference[:, :2], rate)
            files[f"{name}-original.png"] = spectrogram_png(reference, rate, f"{record['source']}: original")
            excerpt["original"] = f"{name}-original"
        for num in levels:
            sound = np.stack([codec.decode(side[:, :num]) for side in sides], axis=1)
            stem, title = f"{name}-{num}", f"{record['source']}: {plural(num, 'codebook')}"
            files[f"{stem}.wav"], files[f"{stem}.png"] = wav_bytes(sound, rate), spectrogram_png(sound, rate, title)
            entry: dict[str, Any] = {"books": num, "file": stem, "bits_per_s": _bits_per_s(codec, num) * len(sides)}
            if reference is not None and reference.any():
                both = min(len(reference), len(sound))
                # One side after the other: their mean would be nothing where they cancel out.
                a, b = reference[:both].T.reshape(-1), sound[:both].T.reshape(-1)
                entry["si_sdr_db"] = float(si_sdr(a, b))
                entry["log_mel"] = float(log_mel_distance(a, b, rate))
            excerpt["books"].append(entry)
        found.append(excerpt)
    report("decoding excerpts", len(chosen), len(chosen))
    return found, files


def _bits_per_s(codec: Codec, num_books: int) -> float:
    return codec.sample_rate / codec.hop * num_books * math.log2(codec.codebook_size)


# Findings


def judge(figures: dict[str, Any]) -> Iterator[Finding]:
    """What a person should know, the worst first."""
    levels, captions, durations = figures["levels"], figures["captions"], figures["durations"]
    train, largest = figures["splits"]["train"], figures["largest_piece"]
    if levels["silent_share"] > 0.5:
        text = (
            f"{percent(levels['silent_share'])} of the training music lies below {SILENT_DB:.0f} dB rms: the model "
            "learns silence."
        )
        yield Finding("mostly-silent", "sure", text, "raise the level of the source, or cut the silence out of it")
    size = figures["codec"]["codebook_size"]
    for book, each in enumerate(figures["books"]["train"]):
        name = book_name(figures, book)
        if each["used_share"] < RARE and train["frames"] >= size:  # fewer frames cannot use it all
            text = f"{name} uses {each['distinct']} of its {size} codes: most of it is wasted."
            yield Finding(
                "codebook-unused", "sure", text, "fit the codec again on music like this, or with fewer codes"
            )
        elif each["most_frequent"] > COMMON:
            text = f"One code of {name} is {percent(each['most_frequent'])} of all its frames."
            remedy = "listen to the excerpts: long silences look like this, and a codec fitted on other music does too"
            yield Finding("codebook-uniform", "likely", text, remedy)
    if captions["with"] < 0.5 * train["records"]:
        text = f"{captions['with']} of {plural(train['records'], 'training record')} have a text."
        remedy = "write song.txt beside song.wav, or a metadata.json; without texts, a prompt in words has no effect"
        yield Finding("captions-missing", "sure", text, remedy)
    elif captions["distinct"] == 1 and train["records"] > 1:
        text = "All texts are the same, so the model cannot learn what words mean."
        yield Finding("captions-alike", "sure", text, "describe what sets the pieces apart")
    if durations["median"] < SHORT_S:
        text = (
            f"Half of the training records are shorter than {durations['median']:.1f} s, {durations['short']} of "
            f"{train['records']} shorter than {SHORT_S:g} s: the model sees no phrase to its end."
        )
        yield Finding("short-clips", "sure", text, "prepare whole tracks rather than clips")
    if train["pieces"] == 1 or largest["share"] > 0.5:
        text = f"{largest['piece']} is {percent(largest['share'])} of the training music: the model learns this piece."
        yield Finding("one-piece", "sure", text, "add other pieces, or take a part of this one")
    held_out = [name for name in figures["splits"] if name != "train"]
    if not held_out:
        text = "Nothing is held out to evaluate on."
        yield Finding("no-held-out", "sure", text, "add pieces: those of one recording stay in one split")
    bad, tracks = figures["quarantined"], sum(split["tracks"] for split in figures["splits"].values())
    if len(bad) >= 3 and len(bad) > 0.1 * (len(bad) + tracks):
        text = f"{plural(len(bad), 'sound file')} could not be used, {plural(tracks, 'track')} could."
        yield Finding("many-quarantined", "sure", text, "look at the reasons below")
    if levels["clipped"]:
        text = f"Peaks are clipped in {_some(levels['clipped'])}."
        yield Finding("clipped", "likely", text, "use a version with a lower gain; the model learns the distortion")
    if levels["dc"]:
        text = f"A DC offset above {percent(MOST_DC)} of full scale in {_some(levels['dc'])}."
        yield Finding("dc-offset", "sure", text, "harmless to the ear; a high-pass at 20 Hz removes it")


def _some(sources: list[str]) -> str:
    names = [*dict.fromkeys(sources)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{plural(len(sources), 'record')} ({', '.join(names[:3])}{more})"


def book_name(figures: dict[str, Any], channel: int) -> str:
    if not figures["stereo"]:
        return f"codebook {channel + 1}"
    side, book = divmod(channel, figures["codec"]["num_codebooks"])
    return f"codebook {book + 1} {('left', 'right')[side]}"


# Page


def summary(figures: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    levels, captions, train = figures["levels"], figures["captions"], figures["splits"]["train"]
    splits = ", ".join(f"{name} {duration(each['seconds'])}" for name, each in figures["splits"].items())
    least = min(each["used_share"] for each in figures["books"]["train"])
    findings = figures["findings"]
    lines = [
        f"{figures['store']}  {splits}; {figures['bits_per_s'] / 1000:.3g} kbit/s",
        f"levels     peak {levels['peak_db']['median']:.1f} dB, rms {levels['rms_db']['median']:.1f} dB (medians)",
        f"texts      {captions['with']} of {train['records']} training records, {captions['distinct']} distinct",
        f"codebooks  every one uses {percent(least)} of its codes or more",
        f"files      {plural(len(figures['quarantined']), 'sound file')} not used",
        plural(len(findings), "finding") + (":" if findings else ""),
    ]
    for each in findings:
        lines += [f"{each['rule']}  {each['certainty']}  {each['text']}", f"  try  {each['remedy']}"]
    return "\n".join(lines)


def page(figures: dict[str, Any], sounds: dict[str, bytes]) -> Page:
    codec, levels, durations = figures["codec"], figures["levels"], figures["durations"]
    side = "two channels, each of them in " if figures["stereo"] else ""
    about = (
        f"{codec.get('name', 'codec')}: {codec['sample_rate']} Hz, {codec['frames_per_s']:.4g} frames a second, {side}"
        f"{plural(codec['num_codebooks'], 'codebook')} of {codec['codebook_size']} codes, "
        f"{figures['bits_per_s'] / 1000:.3g} kbit/s. Fingerprint of the data "
    )
    rows = [[[code(f["rule"])], f["certainty"], f["text"], f["remedy"]] for f in figures["findings"]]
    keys = ("min", "p5", "median", "p95", "max")
    spread: list[list[str]] = [
        [name, *(number(each[key]) for key in keys)]
        for name, each in (
            ("seconds of a record", durations), ("peak, dB", levels["peak_db"]), ("rms, dB", levels["rms_db"]),
        )
    ]  # fmt: skip
    charts = {"seconds": durations, "peak, dB of full scale": levels["peak_db"], "rms, dB": levels["rms_db"]}
    drawn = histograms("Records in training", {name: each["histogram"] for name, each in charts.items()})
    channels = ", ".join(f"{name} in {plural(num, 'record')}" for name, num in sorted(levels["channels"].items()))
    blocks: list[Block] = [
        Paragraph([about, code(figures["fingerprint"]), ". All figures are in ", link("report.json", "report.json"),
                   "; ", link("report.html", "report.html"), " has players."]),
        Heading(2, ["Findings"]),
        Table(["finding", "how sure", "what was seen", "what to try"], rows)
        if rows else Paragraph(["None: nothing here stands in the way of training."]),
        *_listening(figures, sounds),
        Heading(2, ["Splits"]),
        Table(
            ["split", "pieces", "tracks", "records", "frames", "length"],
            [[name, str(s["pieces"]), str(s["tracks"]), str(s["records"]), count(s["frames"]), duration(s["seconds"])]
             for name, s in figures["splits"].items()],
            numeric=range(1, 6),
        ),
        Paragraph([f"Largest piece in training: {figures['largest_piece']['piece']}, "
                   f"{percent(figures['largest_piece']['share'])} of its time."]),
        Heading(2, ["Lengths and levels"]),
        Table(["of the training records", "least", "5 %", "median", "95 %", "most"], spread, numeric=range(1, 6)),
        Picture("levels.svg", "lengths and levels", drawn),
        Paragraph([f"Channels of the sources: {channels}. {percent(levels['silent_share'])} of the time lies in "
                   f"records below {SILENT_DB:.0f} dB rms."]),
        *_captions(figures),
        *_codebooks(figures),
        *_quarantined(figures["quarantined"], figures["remarks"]),
    ]  # fmt: skip
    return Page(f"{figures['store']}: what the music is like", blocks)


def _listening(figures: dict[str, Any], sounds: dict[str, bytes]) -> list[Block]:
    blocks: list[Block] = [
        Heading(2, ["What the codec keeps"]),
        Paragraph(["A model can never sound better than its codec with all codebooks. Fewer show what each one adds."]),
    ]
    for excerpt in figures["excerpts"]:
        blocks.append(Heading(3, [excerpt["source"]]))
        said = f" Text: {excerpt['text']}" if excerpt["text"] else ""
        where = f"{excerpt['seconds']:.1f} s from {excerpt['start_s']:.1f} s of a {excerpt['split']} record.{said}"
        blocks.append(Paragraph([where]))
        shown = [(excerpt["original"], "the original")] if excerpt["original"] else []
        for entry in excerpt["books"]:
            caption = f"{plural(entry['books'], 'codebook')}, {entry['bits_per_s'] / 1000:.3g} kbit/s"
            if "si_sdr_db" in entry:
                caption += f", SI-SDR {entry['si_sdr_db']:.1f} dB, log-mel distance {entry['log_mel']:.2f}"
            shown.append((entry["file"], caption))
        for stem, caption in shown:
            blocks += [File(f"{stem}.wav", caption, sounds[f"{stem}.wav"])]
            blocks += [File(f"{stem}.png", data=sounds[f"{stem}.png"])]
    scored = [entry for excerpt in figures["excerpts"] for entry in excerpt["books"] if "si_sdr_db" in entry]
    if scored:
        rows = []
        for num in sorted({entry["books"] for entry in scored}):
            same = [entry for entry in scored if entry["books"] == num]
            means = [float(np.mean([entry[key] for entry in same])) for key in ("si_sdr_db", "log_mel")]
            rows.append([str(num), f"{same[0]['bits_per_s'] / 1000:.3g}", f"{means[0]:.1f}", f"{means[1]:.2f}"])
        head = ["codebooks", "kbit/s", "SI-SDR, dB", "log-mel distance"]
        blocks[2:2] = [
            Table(head, rows, numeric=range(4)),
            Paragraph([f"Means of {plural(len(figures['excerpts']), 'excerpt')}."]),
        ]
    elif figures["excerpts"]:
        blocks.insert(2, Paragraph(["The originals were not at hand, so nothing is compared with them."]))
    return blocks


def _captions(figures: dict[str, Any]) -> list[Block]:
    captions, records = figures["captions"], figures["splits"]["train"]["records"]
    text = (
        f"{captions['with']} of {plural(records, 'training record')} have a text, {captions['distinct']} different ones"
    )
    if sizes := captions["bytes"]:
        text += f"; {sizes['min']:.0f} to {sizes['max']:.0f} bytes, median {sizes['median']:.0f}"
    blocks: list[Block] = [Heading(2, ["Texts"]), Paragraph([f"{text}."])]
    if captions["tags"]:
        blocks.append(Paragraph(["What they say most often, between commas:"]))
        rows = [[tag, str(num), percent(num / records)] for tag, num in captions["tags"]]
        blocks.append(Table(["text", "records", "share"], rows, numeric=(1, 2)))
    return blocks


def _codebooks(figures: dict[str, Any]) -> list[Block]:
    names = [book_name(figures, k) for k in range(len(figures["books"]["train"]))]
    rows = [
        [name, str(each["distinct"]), percent(each["used_share"]), f"{each['perplexity']:.0f}",
         percent(each["most_frequent"]),
         *(percent(figures["books"][split][k]["used_share"]) for split in figures["books"] if split != "train")]
        for k, (name, each) in enumerate(zip(names, figures["books"]["train"]))
    ]  # fmt: skip
    others = [f"used in {split}" for split in figures["books"] if split != "train"]
    size = figures["codec"]["codebook_size"]
    shares = {"": [100 * each["perplexity"] / size for each in figures["books"]["train"]]}
    return [
        Heading(2, ["Codebooks"]),
        Paragraph([f"Each has {size} codes. Perplexity: so many codes would say as much if all were equally frequent. "
                   "Its logarithm is the loss, in nats, of a model that knows only how frequent each code is."]),
        Table(["training", "distinct", "used", "perplexity", "most frequent code", *others], rows, numeric=range(1, 9)),
        Picture("codebooks.svg", "perplexity", bar_chart("Perplexity in training, % of the codes", names, shares)),
    ]  # fmt: skip


def _quarantined(bad: list[dict[str, str]], remarks: list[dict[str, str]]) -> list[Block]:
    blocks: list[Block] = [Heading(2, ["What was not used"])]
    if not bad:
        blocks.append(Paragraph(["Every sound file was used."]))
    for items, what in ((bad, plural(len(bad), "sound file")), (remarks, plural(len(remarks), "remark"))):
        if items:
            more = f"; the first {MOST_LISTED}" if len(items) > MOST_LISTED else ""
            rows: list[list[Spans | str]] = [[[code(item["file"])], item["reason"]] for item in items[:MOST_LISTED]]
            blocks += [Paragraph([f"{what}{more}:"]), Table(["file", "reason"], rows)]
    return blocks
