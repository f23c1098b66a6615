"""Prepares music: tracks of a source become a store of codes, with the codec that made them beside it.

All tracks of a piece go to one split. The codec is fitted to training tracks alone, or is the one that is named, or
that of the data which is replaced, so that trained models stay of use. What cannot be used is listed with the reason,
and never trained on.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rung import units
from rung.data.audio import levels
from rung.data.store import Store, StoreWriter, place
from rung.errors import DataError
from rung.random import key_of
from rung.recipe import Report
from rung.recipes.music import config as keys
from rung.recipes.music.sources import SPLITS, Source, Track
from rung.recipes.music.spectra import log_mel_distance, si_sdr
from rung.text import printable

if TYPE_CHECKING:
    from rung.recipes.music.codec import Codec

HELD_OUT = 0.06  # of the pieces, for validation and again for test
MANY = 6  # pieces of a folder
MOST_HEARD, HEARD_S = 8, 10.0  # held-out tracks that the codec is measured on, and how much of each
SHORTEST_S = 1.0
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
        split_of = assign_splits(found.tracks, seed)
        quarantined = list(found.quarantined)
        codec, origin = _codec(cfg.codec, before, found.tracks, split_of, quarantined, seed, report, device)
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
        writer.info["quarantined"] = quarantined  # encoding adds to it
        if cfg.codec.name == "rvq":
            with tempfile.TemporaryDirectory() as folder:
                codec.save(Path(folder))
                for file in sorted(Path(folder).iterdir()):
                    writer.file(file.name, file.read_bytes())
        else:  # weights of others stay where they are; the hash tells whether they are still the same
            writer.info["codec"]["path"] = str(codec_folder(cfg.codec.path).resolve())
        return _write(writer, codec, found.tracks, split_of, quarantined, report)


def find_source(source: Path | None, minutes: float, seed: int, report: Report) -> Source:
    if source is None:
        from rung.recipes.music.sources.embedded import embedded

        return embedded(minutes, seed, report)
    from rung.recipes.music.sources.folder import from_folder

    return from_folder(source, report)


def assign_splits(tracks: list[Track], seed: int) -> dict[str, str]:
    """Split of each piece: the publisher's, or in an order that only the seed and the name decide.

    Pieces of a folder that has many of them are held out by that folder, so that every kind of music is evaluated.
    """
    split_of = {track.piece: track.split for track in tracks if track.split is not None}
    free = sorted({track.piece for track in tracks} - split_of.keys())
    folders = Counter(piece.partition("/")[0] for piece in free)
    groups: dict[str, list[str]] = {}
    for piece in free:
        folder = piece.partition("/")[0]
        groups.setdefault(folder if folders[folder] >= MANY else "", []).append(piece)
    for pieces in groups.values():
        pieces.sort(key=lambda piece: (key_of(seed, "split", piece), piece))
        num_held = max(1, round(HELD_OUT * len(pieces))) if len(pieces) >= 3 else 0
        split_of |= dict.fromkeys(pieces, "train")
        split_of |= dict.fromkeys(pieces[:num_held], "validation")
        split_of |= dict.fromkeys(pieces[num_held : 2 * num_held], "test")
        if len(pieces) == 2:
            split_of[pieces[0]] = "validation"
    return split_of


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


def read_track(track: Track, sample_rate: int, stereo: bool) -> list[np.ndarray]:
    """Its sides as (N,) float32: left and right, a mono one twice, or the mean of both."""
    sound = track.read(sample_rate)
    if len(sound) < SHORTEST_S * sample_rate:
        problem = f"lasts {len(sound) / sample_rate:.2f} s, less than {SHORTEST_S:g} s"
        raise DataError(problem, code="too-short")
    if not stereo:
        return [np.ascontiguousarray(sound.mean(axis=1, dtype=np.float32))]
    return [np.ascontiguousarray(sound[:, 0]), np.ascontiguousarray(sound[:, -1])]


def _codec(
    cfg: keys.Codec, before: Path | None, tracks: list[Track], split_of: dict[str, str],
    quarantined: list[dict[str, str]], seed: int, report: Report, device: str,
) -> tuple[Codec, str]:  # fmt: skip
    """The codec, and where it comes from."""
    import torch

    from rung.recipes.music.codec import open_codec

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.path:
        return open_codec(cfg.name, codec_folder(cfg.path), device), f"of {cfg.path}"
    if before is not None and not cfg.fit:
        codec = open_codec(cfg.name, before, device)
        if all(getattr(codec, one) == getattr(cfg, one) for one in CODEC_KEYS):
            return codec, "that of the data before"
    from rung.recipes.music.rvq import fit_codec

    # One track after the other, an equal share of each, from a random place: quiet openings teach little.
    chosen = [track for track in tracks if split_of[track.piece] == "train"]
    order = sorted(chosen, key=lambda track: key_of(seed, "codec", track.name))
    wanted = round(cfg.fit_minutes * 60 * cfg.sample_rate)
    share = max(5 * cfg.sample_rate, wanted // max(1, len(order)))
    sounds: list[np.ndarray] = []
    for track in order:
        num_read = sum(map(len, sounds))
        report("reading for the codec", min(num_read, wanted) // cfg.sample_rate, wanted // cfg.sample_rate)
        if num_read >= wanted:
            break
        try:
            [sound] = read_track(track, cfg.sample_rate, stereo=False)
        except DataError:
            continue  # it is listed when it is encoded
        start = key_of(seed, "codec", track.name, "start") % max(1, len(sound) - share)
        sounds.append(sound[start : start + share])
    if not sounds:
        raise _nothing(len(tracks), quarantined)
    codec = fit_codec(
        sounds, sample_rate=cfg.sample_rate, hop=cfg.hop, num_codebooks=cfg.num_codebooks,
        codebook_size=cfg.codebook_size, steps=cfg.steps, seed=seed, device=device, report=report,
    )  # fmt: skip
    return codec, "fitted"


def _nothing(num_tracks: int, quarantined: list[dict[str, str]]) -> DataError:
    why = f"; the first: {quarantined[0]['file']}: {quarantined[0]['reason']}" if quarantined else ""
    return DataError(
        f"nothing to learn from in {num_tracks} tracks: {len(quarantined)} could not be used{why}; pass --from a "
        "folder with WAV, FLAC, OGG or MP3 files",
        code="data-empty",
    )


def _encoded(
    codec: Codec, tracks: list[Track], stereo: bool, quarantined: list[dict[str, str]], report: Report
) -> Iterator[tuple[Track, list[np.ndarray], np.ndarray, dict[str, Any]]]:
    """Each track with its sides, its codes and what is to be remembered of it."""
    for number, track in enumerate(tracks):
        report("encoding", number, len(tracks))
        try:
            sides = read_track(track, codec.sample_rate, stereo)
        except DataError as error:
            quarantined.append({"file": track.name, "reason": str(error)})
            continue
        measured = levels(np.stack(sides, axis=1), codec.sample_rate)._asdict()
        about = {name: round(float(value), 5) for name, value in measured.items()}
        about |= {"seconds": round(len(sides[0]) / codec.sample_rate, 2), "channels": len(sides)}
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
    heard: list[tuple[np.ndarray, np.ndarray]] = []  # beginnings of held-out tracks, and their codes
    for track, sides, codes_TC, about in _encoded(codec, tracks, stereo, quarantined, report):
        split = split_of[track.piece]
        if split == "validation" and len(heard) < MOST_HEARD:
            num_frames = min(len(codes_TC), round(HEARD_S * codec.frames_per_s))
            heard.append((sides[0][: num_frames * codec.hop], codes_TC[:num_frames, : codec.num_codebooks]))
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
        raise _nothing(len(tracks), quarantined)
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
        self.pairs = [np.zeros(0, np.int64) for _ in range(num_channels)]  # first * size + second, as they came
        self._first = np.zeros((num_channels, codebook_size), np.int64)

    def add(self, codes_TC: np.ndarray) -> None:
        for channel, codes in enumerate(codes_TC.astype(np.int64).T):
            self.single[channel] += np.bincount(codes, minlength=self.size)
            self._first[channel] += np.bincount(codes[:1], minlength=self.size)
            self.pairs[channel] = np.concatenate([self.pairs[channel], codes[:-1] * self.size + codes[1:]])

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
        for channel, counts in enumerate(self.single):
            if not counts.sum():
                return {}
            shares = (train.single[channel] + 1) / (train.single[channel].sum() + self.size)
            found["unigram"].append(float(-(counts * np.log(shares)).sum() / counts.sum()))
            seen, times = np.unique(train.pairs[channel], return_counts=True)
            num_after = np.bincount(seen // self.size, times, self.size)
            num_kinds = np.bincount(seen // self.size, minlength=self.size)
            pairs = self.pairs[channel]
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
    total = {key: sum(counts[split][key] for split in SPLITS) for key in counts["train"]}
    sides = "left and right" if info["stereo"] else "mono"
    lines = [
        f"{total['pieces']} pieces in {total['tracks']} tracks, {total['hours']:.2f} h, {sides}, "
        f"{units.count(total['frames'])} frames; {total['texts']} tracks have a text",
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
        frames = f"{one['hours']:.2f} h, {units.count(one['frames'])} frames"
        text = f"{one['pieces']} pieces, {one['tracks']} tracks, {frames}"
        if not one["tracks"]:
            text = f"empty: a split by piece needs {2 if split == 'validation' else 3} pieces or more"
        elif baselines := info["baselines"][split]:
            means = [f"{name} {np.mean(values):.3f}" for name, values in baselines.items()]
            text += f"; nats a code: {', '.join(means)}"
        lines.append(f"  {split:<10}  {text}")
    used = ", ".join(f"{one['used']}" for one in info["coverage"]["train"])
    lines.append(f"codes in use by channel, of {codec['codebook_size']}: {used}")
    if bad:
        named = "; ".join(printable(f"{item['file']}: {item['reason']}") for item in bad[:3])
        lines.append(f"quarantined {len(bad)} tracks ({named}{'; ..' if len(bad) > 3 else ''})")
    return "\n".join(lines)


def open_store(name: str, key: str = "base_dataset_name") -> Store:
    path = place(name)
    if not path.exists():
        command = "rung data music" if name == "music" else f"rung data music --from FOLDER --name {name}"
        problem = f"no data at {path}; prepare it with `{command}`, or name another with dataset.{key}"
        raise DataError(problem, code="no-data")
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
            sides = read_track(tracks[record["source"]], store.info["codec"]["sample_rate"], store.info["stereo"])
        except (KeyError, DataError):
            return None
        is_same = abs(len(sides[0]) / store.info["codec"]["sample_rate"] - record["seconds"]) < 0.1
        return np.stack(sides, axis=1) if is_same else None

    return original
