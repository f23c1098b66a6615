"""Prepares music: tracks of a source become a store of codes, with the codec that made them beside it.

Files are read twice: to know which can be used and how long they last, and to encode them. Only what can be used is
split, by time, all tracks of a piece together. The codec is fitted to training tracks alone, or is the one that is
named, or that of the data which is replaced, so that trained models stay of use. What cannot be used is listed with the
reason, and never trained on.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rung import units
from rung.config import load_file
from rung.data.audio import MOST_SILENT, SILENCE_DB, Recording, levels
from rung.data.store import Store, StoreWriter, missing, place
from rung.errors import DataError
from rung.random import key_of
from rung.recipe import Report
from rung.recipes.music import config as keys
from rung.recipes.music.sources import SPLITS, Source, Track
from rung.recipes.music.spectra import log_mel_distance, si_sdr
from rung.text import printable
from rung.units import plural

if TYPE_CHECKING:
    from rung.recipes.music.codec import Codec

HELD_OUT = 0.06  # of the time, for validation and again for test
MANY = 16  # pieces of a folder that is split by itself: one of them is about that share
MOST_HEARD, HEARD_S = 8, 10.0  # held-out tracks that the codec is measured on, and how much of each
SHORTEST_S = 1.0
LITTLE_S = 10.0  # a validation split that is shorter says little
CODEC = "codec.json"  # in the folder of a codec, and in a store beside its codes
CODEC_KEYS = ("sample_rate", "hop", "num_codebooks", "codebook_size")


def prepare(
    source: Path | None,
    out: Path,
    cfg: keys.Config,
    *,
    seed: int,
    name: str,
    replace: bool,
    report: Report,
    device: str,
) -> str:
    """Writes the store and returns a summary of it."""
    if source is not None and out.exists() and source.resolve().is_relative_to(out.resolve()):
        problem = f"{source} lies in {out}, which would be replaced; choose another place with --name"
        raise DataError(problem, code="options-conflict")
    before = out if (out / CODEC).is_file() else None
    with StoreWriter(out, kind="music", replace=replace) as writer:  # first: a name that is taken is found at once
        found = find_source(source, cfg.dataset.minutes, seed, report)
        quarantined = list(found.quarantined)
        codec, origin, notes = _given_codec(cfg.codec, before, device)
        sample_rate = cfg.codec.sample_rate if codec is None else codec.sample_rate
        tracks = _usable(found.tracks, sample_rate, cfg.dataset.stereo, quarantined, report)
        if not tracks:
            raise _nothing(quarantined)
        # Of the embedded music both kinds are held out, however few pieces there are.
        split_of = assign_splits(tracks, seed, MANY if source is not None else 2)
        if codec is None:
            train = [track for track in tracks if split_of[track.piece] == "train"]
            codec = _fitted(cfg.codec, train, cfg.dataset.stereo, seed, report, device)
        settings: dict[str, Any] = {"stereo": cfg.dataset.stereo, "seed": seed, "codec": {"name": cfg.codec.name}}
        settings["codec"] |= {one: getattr(codec, one) for one in CODEC_KEYS}
        if origin == "fitted":
            settings["codec"] |= {"steps": cfg.codec.steps, "fit_minutes": cfg.codec.fit_minutes}
        if source is None:
            settings["minutes"] = cfg.dataset.minutes
        else:
            writer.info["folder"] = str(source.resolve())  # where a report finds the originals again
        writer.info.update(name=name, settings=settings, source=found.name, stereo=cfg.dataset.stereo)
        about = {one: getattr(codec, one) for one in ("name", "hash", *CODEC_KEYS)}
        writer.info["codec"] = about | {"kind": cfg.codec.name, "bits_per_s": codec.bits_per_s, "origin": origin}
        writer.info.update(quarantined=quarantined, remarks=found.remarks, notes=notes)  # encoding adds to the first
        if cfg.codec.name == "rvq":
            with tempfile.TemporaryDirectory() as folder:
                codec.save(Path(folder))
                for file in sorted(Path(folder).iterdir()):
                    writer.file(file.name, file.read_bytes())
        else:  # weights of others stay where they are; the hash tells whether they are still the same
            writer.info["codec"]["path"] = str(codec_folder(cfg.codec.path).resolve())
        return _write(writer, codec, tracks, split_of, quarantined, report)


def find_source(source: Path | None, minutes: float, seed: int, report: Report) -> Source:
    if source is None:
        from rung.recipes.music.sources.embedded import embedded

        return embedded(minutes, seed, report)
    from rung.recipes.music.sources.folder import from_folder

    return from_folder(source, report)


def assign_splits(tracks: Sequence[Track], seed: int, many: int = MANY) -> dict[str, str]:
    """Split of each piece: the publisher's, or by time, in an order that only the seed and the name decide.

    Pieces of a folder with `many` of them are held out by that folder, so that every kind of music is evaluated.
    """
    split_of = {track.piece: track.split for track in tracks if track.split is not None}
    seconds: dict[str, float] = {}
    for track in tracks:
        if track.piece not in split_of:
            seconds[track.piece] = seconds.get(track.piece, 0.0) + (track.seconds or 0.0)
    folders = Counter(piece.partition("/")[0] for piece in seconds)
    groups: dict[str, dict[str, float]] = {}
    for piece in sorted(seconds, key=lambda piece: (key_of(seed, "split", piece), piece)):
        folder = piece.partition("/")[0]
        groups.setdefault(folder if folders[folder] >= many else "", {})[piece] = seconds[piece]
    for group in groups.values():
        split_of |= dict.fromkeys(group, "train") | _held_out(group)
    return split_of


def _held_out(seconds: dict[str, float]) -> dict[str, str]:
    """Which pieces of these, in their order, are held out, and for which split."""
    longest = max(seconds, key=lambda piece: seconds[piece])
    others = [piece for piece in seconds if piece != longest]
    if len(others) < 2:
        return dict.fromkeys(others, "validation")
    # The longest piece is for training, and none that is both long for its set and more than a whole share is held out.
    share = HELD_OUT * sum(seconds.values())
    most = max(share, float(np.median([*seconds.values()])))
    first, second, *rest = [piece for piece in others if seconds[piece] <= most]
    found, held = {first: "validation", second: "test"}, {"validation": seconds[first], "test": seconds[second]}
    for piece in rest:
        split = next((split for split in held if held[split] + seconds[piece] / 2 <= share), None)
        if split is None:
            break
        found[piece] = split
        held[split] += seconds[piece]
    return found


def codec_folder(named: str) -> Path:
    """Where a codec lies: a folder, or that of prepared data."""
    for folder in (Path(named).expanduser(), place(named)):
        if (folder / CODEC).is_file() or (folder / "config.json").is_file():  # ours, or one of transformers
            return folder
    raise DataError(
        f"codec.path={named} is neither the folder of a codec nor prepared music ({place(named)} has no codec); "
        "`rung data music --name NAME` prepares some",
        code="no-data",
    )


def read_track(track: Track, sample_rate: int, stereo: bool) -> tuple[list[np.ndarray], Recording]:
    """Its sides as (N,) float32: left and right, a mono one twice, or the mean of both; and what they were made of."""
    recording = track.read(sample_rate)
    sound = recording.sound
    if len(sound) < SHORTEST_S * sample_rate:
        problem = f"lasts {len(sound) / sample_rate:.2f} s, less than {SHORTEST_S:g} s"
        raise DataError(problem, code="too-short")
    sides = [sound[:, 0], sound[:, -1]] if stereo else [sound.mean(axis=1, dtype=np.float32)]
    silent = levels(np.stack(sides, axis=1), sample_rate).silent_share
    if silent > MOST_SILENT:  # though the file was not: what cancels out, or lies above half the sample rate
        how = f"at {sample_rate} samples a second" if stereo else f"mixed to one channel at {sample_rate} Hz"
        remedy = "" if stereo or sound.shape[1] == 1 else "; dataset.stereo=true keeps left and right apart"
        problem = f"is silent once it is {how}: {silent:.0%} of it lies below {SILENCE_DB:.0f} dB of full scale"
        raise DataError(problem + remedy, code="audio-silent")
    return [np.ascontiguousarray(side) for side in sides], recording


def audible_frame(sound_N: np.ndarray, hop: int, num_frames: int, wanted: int) -> int:
    """The frame nearest to `wanted` at which `num_frames` begin that are silent for less than half of the time, or for
    as little as there is."""
    total = len(sound_N) // hop
    if total <= num_frames:
        return 0
    is_loud = np.abs(sound_N[: total * hop]).reshape(total, hop).max(axis=1) > 10 ** (SILENCE_DB / 20)
    num_loud = np.concatenate([[0], np.cumsum(is_loud)])
    num_loud = num_loud[num_frames:] - num_loud[:-num_frames]
    places = np.flatnonzero(num_loud >= min(num_frames / 2, num_loud.max()))
    return int(places[np.abs(places - wanted).argmin()])


def _usable(
    tracks: list[Track], sample_rate: int, stereo: bool, quarantined: list[dict[str, str]], report: Report
) -> list[Track]:
    """Those that can be read, with their lengths; the others are added to the list."""
    found = []
    for number, track in enumerate(tracks):
        report("checking", number, len(tracks))
        if track.seconds is None:
            try:
                sides, _ = read_track(track, sample_rate, stereo)
            except DataError as error:
                quarantined.append({"file": track.name, "reason": str(error)})
                continue
            track = changed(track, seconds=len(sides[0]) / sample_rate)
        found.append(track)
    report("checking", len(tracks), len(tracks))
    return found


def _given_codec(cfg: keys.Codec, before: Path | None, device: str) -> tuple[Codec | None, str, list[str]]:
    """The codec, None if it is to be fitted; where it comes from; and what was decided against what was asked."""
    from rung.recipes.music.codec import open_codec

    if cfg.path:
        codec = open_codec(cfg.name, codec_folder(cfg.path), _device(device))
        usual = keys.Codec()  # of other codecs nobody expects the sizes that rvq has by default
        asked = {one: getattr(cfg, one) for one in CODEC_KEYS}
        ignored = [
            f"codec.{one}={value}, it has {getattr(codec, one)}"
            for one, value in asked.items()
            if value != getattr(codec, one) and (cfg.name == "rvq" or value != getattr(usual, one))
        ]
        note = f"no effect on the codec of {cfg.path}: {'; '.join(ignored)}"
        return codec, f"of {cfg.path}", [note] if ignored else []
    if before is None or cfg.fit:
        return None, "fitted", []
    codec = open_codec(cfg.name, before, _device(device))
    if other := [one for one in CODEC_KEYS if getattr(codec, one) != getattr(cfg, one)]:
        why = "; ".join(f"codec.{one}={getattr(cfg, one)}, it has {getattr(codec, one)}" for one in other)
        note = f"the codec of the data before was not kept: {why}; models trained on its codes do not read these"
        return None, "fitted", [note]
    return codec, "that of the data before", []


def _device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _fitted(cfg: keys.Codec, tracks: list[Track], stereo: bool, seed: int, report: Report, device: str) -> Codec:
    """A codec of these tracks: one after the other, an equal share of each, from a random place, as quiet openings
    teach little."""
    from rung.recipes.music.rvq import fit_codec

    order = sorted(tracks, key=lambda track: key_of(seed, "codec", track.name))
    wanted = round(cfg.fit_minutes * 60 * cfg.sample_rate)
    share = max(5 * cfg.sample_rate, wanted // max(1, len(order)))
    sounds: list[np.ndarray] = []
    for track in order:
        num_read = sum(map(len, sounds))
        report("reading for the codec", min(num_read, wanted) // cfg.sample_rate, wanted // cfg.sample_rate)
        if num_read >= wanted:
            break
        try:
            sides, _ = read_track(track, cfg.sample_rate, stereo)
        except DataError:
            continue  # it is listed when it is encoded
        sides = [side for side in sides if side.any()]
        sound = sides[key_of(seed, "codec", track.name, "side") % len(sides)]
        start = key_of(seed, "codec", track.name, "start") % max(1, len(sound) - share)
        start = cfg.hop * audible_frame(sound, cfg.hop, share // cfg.hop, start // cfg.hop)
        sounds.append(sound[start : start + share])
    if not sounds:
        raise DataError("no training track could be read a second time; were they moved?", code="data-empty")
    return fit_codec(
        sounds, sample_rate=cfg.sample_rate, hop=cfg.hop, num_codebooks=cfg.num_codebooks,
        codebook_size=cfg.codebook_size, steps=cfg.steps, seed=seed, device=_device(device), report=report,
    )  # fmt: skip


def _nothing(quarantined: list[dict[str, str]]) -> DataError:
    return DataError(
        f"nothing to learn from: {plural(len(quarantined), 'track')} could not be used ({_reasons(quarantined)}); pass "
        "--from a folder with other WAV, FLAC, OGG or MP3 files",
        code="data-empty",
    )


def _reasons(items: list[dict[str, str]]) -> str:
    """The first three reasons, each with the first file that it is about."""
    files: dict[str, list[str]] = {}
    for item in items:
        reason = item["reason"].removeprefix(f"{Path(item['file']).name} ")
        files.setdefault(reason, []).append(item["file"])
    named = [
        printable(f"{some[0]}{f' and {len(some) - 1} more' if len(some) > 1 else ''}: {reason}")
        for reason, some in files.items()
    ]
    return "; ".join([*named[:3], *([".."] if len(named) > 3 else [])])


def _encoded(
    codec: Codec, tracks: list[Track], stereo: bool, quarantined: list[dict[str, str]], report: Report
) -> Iterator[tuple[Track, list[np.ndarray], np.ndarray, dict[str, Any]]]:
    """Each track with its sides, its codes and what is to be remembered of it."""
    for number, track in enumerate(tracks):
        report("encoding", number, len(tracks))
        try:
            sides, recording = read_track(track, codec.sample_rate, stereo)
        except DataError as error:
            quarantined.append({"file": track.name, "reason": str(error)})
            continue
        measured = levels(np.stack(sides, axis=1), codec.sample_rate)._asdict()
        measured["clipped_share"] = recording.levels.clipped_share  # resampling and mixing hide it
        about = {name: round(float(value), 5) for name, value in measured.items()}
        about |= {"seconds": round(len(sides[0]) / codec.sample_rate, 2), "channels": recording.num_channels}
        yield track, sides, np.concatenate([codec.encode(side) for side in sides], axis=1), about
    report("encoding", len(tracks), len(tracks))


def _write(
    writer: StoreWriter, codec: Codec, tracks: list[Track], split_of: dict[str, str],
    quarantined: list[dict[str, str]], report: Report,
) -> str:  # fmt: skip
    stereo = bool(writer.info["stereo"])
    num_channels = codec.num_codebooks * (2 if stereo else 1)
    writer.array("codes", np.uint16, (num_channels,))
    statistics = {split: CodeStatistics(num_channels, codec.codebook_size) for split in SPLITS}
    counts = {split: {"pieces": 0, "tracks": 0, "texts": 0, "hours": 0.0, "frames": 0} for split in SPLITS}
    pieces: dict[str, set[str]] = {split: set() for split in SPLITS}
    heard: list[tuple[np.ndarray, np.ndarray]] = []  # excerpts of held-out tracks, and their codes
    for track, sides, codes_TC, about in _encoded(codec, tracks, stereo, quarantined, report):
        split = split_of[track.piece]
        if split == "validation" and len(heard) < MOST_HEARD:
            louder = max(range(len(sides)), key=lambda side: float(np.square(sides[side]).sum()))
            num_frames = min(len(codes_TC), round(HEARD_S * codec.frames_per_s))
            first = audible_frame(sides[louder], codec.hop, num_frames, 0)
            sound = sides[louder][first * codec.hop : (first + num_frames) * codec.hop]
            books = slice(louder * codec.num_codebooks, (louder + 1) * codec.num_codebooks)
            if sound.any():
                heard.append((sound, codes_TC[first : first + num_frames, books]))
        start = writer.append("codes", codes_TC)
        writer.record(
            split=split, start=start, length=len(codes_TC), piece=track.piece, source=track.name, text=track.text,
            **about,
        )  # fmt: skip
        statistics[split].add(codes_TC)
        pieces[split].add(track.piece)
        one = counts[split]
        one["tracks"] += 1
        one["texts"] += bool(track.text)
        one["hours"] += about["seconds"] / 3600
        one["frames"] += len(codes_TC)
    for split in SPLITS:
        counts[split] |= {"pieces": len(pieces[split]), "hours": round(counts[split]["hours"], 3)}
    if not counts["train"]["tracks"]:
        raise _nothing(quarantined)
    writer.info.update(
        counts=counts,
        coverage={split: statistics[split].coverage() for split in SPLITS},
        # What models that know little lose on each split, in nats by channel, fitted to the training split.
        baselines={split: statistics[split].losses_of(statistics["train"]) for split in SPLITS},
    )
    writer.info["codec"]["reconstruction"] = _reconstruction(codec, heard)
    writer.info["summary"] = summary = _summary(writer.info)
    return summary


def _reconstruction(codec: Codec, heard: list[tuple[np.ndarray, np.ndarray]]) -> list[dict[str, float]]:
    """How near the sound of the codes is to what was encoded, by the number of codebooks, on held-out music."""
    found = []
    numbers = {*(2**n for n in range(6) if 2**n < codec.num_codebooks), codec.num_codebooks} if heard else set()
    for num_books in sorted(numbers):
        pairs = [(sound, codec.decode(codes[:, :num_books])[: len(sound)]) for sound, codes in heard]
        pairs = [(sound[: len(made)], made) for sound, made in pairs]
        found.append(
            {
                "codebooks": num_books,
                "kbit_per_s": round(codec.bits_per_s / 1000 * num_books / codec.num_codebooks, 3),
                "si_sdr_db": round(float(np.mean([si_sdr(sound, made) for sound, made in pairs])), 2),
                "log_mel": round(float(np.mean([log_mel_distance(*pair, codec.sample_rate) for pair in pairs])), 3),
            }
        )
    return found


class CodeStatistics:
    """Counts of the codes of each channel, and of pairs of successive ones."""

    def __init__(self, num_channels: int, codebook_size: int) -> None:
        self.size = codebook_size
        self.single = np.zeros((num_channels, codebook_size), np.int64)
        self._pairs = [np.zeros((num_channels, 0), np.int64)]  # of each track: first * size + second, as they came
        self._first = np.zeros((num_channels, codebook_size), np.int64)

    def add(self, codes_TC: np.ndarray) -> None:
        codes_CT = codes_TC.astype(np.int64).T
        for channel, codes in enumerate(codes_CT):
            self.single[channel] += np.bincount(codes, minlength=self.size)
            self._first[channel] += np.bincount(codes[:1], minlength=self.size)
        self._pairs.append(codes_CT[:, :-1] * self.size + codes_CT[:, 1:])

    @property
    def pairs(self) -> np.ndarray:
        """(channels, pairs) of all tracks; joined when they are asked for, as joining copies all."""
        self._pairs = [np.concatenate(self._pairs, axis=1)]
        return self._pairs[0]

    def coverage(self) -> list[dict[str, float]]:
        """Of each channel: codes in use, their perplexity, and the share of the commonest."""
        found = []
        for counts in self.single:
            shares = counts[counts > 0] / max(1, counts.sum())
            found.append(
                {
                    "used": len(shares), "of": self.size,
                    "perplexity": round(float(np.exp(-(shares * np.log(shares)).sum())), 2) if len(shares) else 0.0,
                    "largest_share": round(float(shares.max(initial=0.0)), 4),
                }
            )  # fmt: skip
        return found

    def losses_of(self, train: CodeStatistics) -> dict[str, list[float]]:
        """Nats per code of a unigram and of a bigram model of the training split, on this one, by channel.

        The unigram has one count more for every code; the bigram falls back to it as far as a code was followed by
        many different ones (Witten-Bell).
        """
        found: dict[str, list[float]] = {"unigram": [], "bigram": []}
        pairs_of_train, pairs_here = train.pairs, self.pairs
        for channel, counts in enumerate(self.single):
            if not counts.sum():
                return {}
            shares = (train.single[channel] + 1) / (train.single[channel].sum() + self.size)
            found["unigram"].append(float(-(counts * np.log(shares)).sum() / counts.sum()))
            seen, times = np.unique(pairs_of_train[channel], return_counts=True)
            num_after = np.bincount(seen // self.size, times, self.size)
            num_kinds = np.bincount(seen // self.size, minlength=self.size)
            pairs = pairs_here[channel]
            at = np.searchsorted(seen, pairs).clip(max=max(0, len(seen) - 1))
            hits = np.where(seen[at] == pairs, times[at], 0) if len(seen) else np.zeros(len(pairs))
            first, second = pairs // self.size, pairs % self.size
            kinds = np.maximum(num_kinds[first], 1)
            total = -np.log((hits + kinds * shares[second]) / (num_after[first] + kinds)).sum()
            total -= (self._first[channel] * np.log(shares)).sum()  # the first of a track follows nothing
            found["bigram"].append(float(total / counts.sum()))
        return found


def _summary(info: dict[str, Any]) -> str:
    counts, codec, bad = info["counts"], info["codec"], info["quarantined"]
    length = {split: one["frames"] * codec["hop"] / codec["sample_rate"] for split, one in counts.items()}  # seconds
    total = {key: sum(counts[split][key] for split in SPLITS) for key in counts["train"]}
    sides = "left and right" if info["stereo"] else "mono"
    lines = [
        f"{plural(total['pieces'], 'piece')} in {plural(total['tracks'], 'track')}, "
        f"{units.duration(sum(length.values()))}, {sides}, {units.count(total['frames'])} frames; "
        f"{total['texts']} of the tracks have a text",
        f"codec {codec['name']} {codec['hash'][:8]} ({codec['origin']}): {codec['num_codebooks']} x "
        f"{codec['codebook_size']} codes, {codec['sample_rate'] / codec['hop']:.4g} frames/s, "
        f"{codec['bits_per_s'] / 1000:.4g} kbit/s a side",
    ]
    if known := codec["reconstruction"]:
        figures = "; ".join(
            f"{one['kbit_per_s']:g} kbit/s {one['si_sdr_db']:.1f} dB, {one['log_mel']:.2f}" for one in known
        )
        lines.append(f"held-out music through it, SI-SDR and log-mel distance: {figures}")
    for split, one in counts.items():
        text = f"{plural(one['pieces'], 'piece')}, {plural(one['tracks'], 'track')}, {units.duration(length[split])}"
        text += f", {units.count(one['frames'])} frames"
        if not one["tracks"]:
            text = f"empty: a split by piece needs {2 if split == 'validation' else 3} pieces or more"
        elif baselines := info["baselines"][split]:
            means = [f"{name} {np.mean(values):.3f}" for name, values in baselines.items()]
            text += f"; nats a code: {', '.join(means)}"
        lines.append(f"  {split:<10}  {text}")
    used = ", ".join(f"{one['used']}" for one in info["coverage"]["train"])
    lines.append(f"codes in use by channel, of {codec['codebook_size']}: {used}")
    lines += info["notes"]
    if counts["validation"]["tracks"]:
        if length["validation"] < LITTLE_S:
            lines.append(f"validation lasts {units.duration(length['validation'])}: its loss says little; add pieces")
        if length["train"] < length["validation"]:
            lines.append("there is less to train on than to validate on; add pieces")
    for items, what in ((bad, f"quarantined {plural(len(bad), 'sound file')}"), (info["remarks"], "remarks")):
        if items:
            lines.append(f"{what} ({_reasons(items)})")
    return "\n".join(lines)


class TrainedOn(Store):
    """Further data to train on, without the pieces that the base holds out.

    A record is left out if its piece is held out in a base of the same source, or if its codes are those of a held-out
    record. The same recording in another source, cut or encoded otherwise, is not recognised.
    """

    def __init__(self, whole: Store, base: Store) -> None:
        self.__dict__.update(vars(whole))
        held = [n for split in base.splits if split != "train" for n in base.split(split).tolist()]
        pieces, codes = set[str](), dict[int, set[bytes]]()  # codes by their length, so that few records are read
        for number in held:
            pieces.add(base.index[number]["piece"])
            codes.setdefault(int(base.lengths[number]), set()).add(_codes_digest(base, number))
        if whole.info["source"] != base.info["source"]:
            pieces.clear()
        everything = whole.split("train").tolist() if "train" in whole.splits else []
        kept = [
            number
            for number in everything
            if whole.index[number]["piece"] not in pieces
            and not ((same := codes.get(int(whole.lengths[number]))) and _codes_digest(whole, number) in same)
        ]
        self.num_left_out, self.num_before = len(everything) - len(kept), len(everything)
        self._splits = {"train": kept}

    @property
    def fingerprint(self) -> str:
        if not self.num_left_out:
            return super().fingerprint
        kept = np.array(self._splits["train"], "<i8").tobytes()
        return f"{super().fingerprint}-{hashlib.blake2b(kept, digest_size=8).hexdigest()}"


def _codes_digest(store: Store, number: int) -> bytes:
    start, length = int(store.starts[number]), int(store.lengths[number])
    return hashlib.sha256(np.ascontiguousarray(store.arrays["codes"][start : start + length]).tobytes()).digest()


def open_store(name: str, key: str = "base_dataset_name") -> Store:
    path = place(name)
    if not path.exists():
        files = sorted((Path(__file__).parent / "presets").glob("*.yaml"))
        named = {load_file(file).get("dataset", {}).get("base_dataset_name"): file.stem for file in files}
        raise missing("music", name, key, f"rung data music preset={named[name]}" if name in named else "")
    return Store.open(path, kind="music")


def codec_of(store: Store) -> Codec:
    """The codec whose codes these are; refused where another one lies in its place."""
    from rung.recipes.music.codec import open_codec

    about = store.info["codec"]
    codec = open_codec(about["kind"], Path(about.get("path") or store.path))
    if codec.hash != about["hash"]:
        now = f"{about.get('path') or store.path} holds {codec.hash[:8]}.."
        problem = f"{store.path} was encoded with codec {about['hash'][:8]}.., but {now}"
        raise DataError(f"{problem}; put the old weights back, or prepare the data again", code="data-mismatch")
    return codec


def original_of(store: Store) -> Callable[[dict[str, Any]], np.ndarray | None]:
    """What gives the sound of a record again, at the codec's rate; None where its file is gone or has changed."""
    folder, settings = store.info.get("folder"), store.info["settings"]
    try:
        source = None if folder is None else Path(folder)
        found = find_source(source, settings.get("minutes", 0.0), settings["seed"], lambda what, done, total: None)
    except DataError:
        return lambda record: None
    tracks = {track.name: track for track in found.tracks}

    def original(record: dict[str, Any]) -> np.ndarray | None:
        try:
            track = tracks[record["source"]]
            sides, _ = read_track(track, store.info["codec"]["sample_rate"], store.info["stereo"])
        except (KeyError, DataError):
            return None
        is_same = abs(len(sides[0]) / store.info["codec"]["sample_rate"] - record["seconds"]) < 0.1
        return np.stack(sides, axis=1) if is_same else None

    return original
