"""Reads SoundFont 2 files and plays notes with them, in numpy alone.

Does pitch, loops, volume envelopes and the low-pass filter with its envelope, with the same bytes for the same notes on
one platform: the notes of one program in mono (`render`), or the channels of a MIDI file in stereo, with their volume,
expression, pan and pitch bend (`perform`). Leaves out chorus, reverb, vibrato, tremolo, modulators and exclusive
classes. Velocity changes the loudness and not the timbre, so each key is rendered once and every note of it is cut from
that wave; only a note during which the bend changes has a wave of its own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rung.data.midi import DRUM_BANK, Channel, Curve, Performance
from rung.errors import DataError

Notes = np.ndarray | Mapping[str, np.ndarray]  # anything with columns start, end (s), pitch, velocity
MEMBER = "pretty_midi/TimGM6mb.sf2"  # where the default font lies in its package
LONGEST_S = 3600.0  # one hour of sound is 346 MB at 24 kHz; a model that never ends a note should not fill the memory
SILENT_DB = 90.0  # below the last bit of 16
RAMP_S = 0.005  # how long a change of volume or pan takes; at once it would click
FULL_DB = 100.0  # SF2 2.01, 8.1.3: envelope times are those of a change by 100 dB

_RECORDS = {  # SF2 2.01, chapter 7: the tables of a file, each closed by one record that only marks the end
    "phdr": np.dtype([("name", "S20"), ("program", "<u2"), ("bank", "<u2"), ("bag", "<u2"), ("_", "V12")]),
    "pbag": np.dtype([("gen", "<u2"), ("mod", "<u2")]),
    "pgen": np.dtype([("kind", "<u2"), ("amount", "<i2")]),
    "inst": np.dtype([("name", "S20"), ("bag", "<u2")]),
    "ibag": np.dtype([("gen", "<u2"), ("mod", "<u2")]),
    "igen": np.dtype([("kind", "<u2"), ("amount", "<i2")]),
    "shdr": np.dtype(
        [
            ("name", "S20"), ("start", "<u4"), ("end", "<u4"), ("loop_start", "<u4"), ("loop_end", "<u4"),
            ("rate", "<u4"), ("root", "u1"), ("correction", "i1"), ("link", "<u2"), ("kind", "<u2"),
        ]
    ),
}  # fmt: skip
_POINTERS = (("phdr", "bag", "pbag"), ("inst", "bag", "ibag"), ("pbag", "gen", "pgen"), ("ibag", "gen", "igen"))
_INSTRUMENT, _SAMPLE, _KEYS, _VELOCITIES = 41, 53, 43, 44  # generators by number, SF2 2.01, 8.1.2
_DEFAULTS = {8: 13500, 56: 100} | dict.fromkeys((25, 26, 27, 28, 30, 33, 34, 35, 36, 38), -12000)
_COMPRESSED, _ROM = 0x10, 0x8000  # bits of a sample's kind
_LEFT_OR_RIGHT = 2 | 4


@dataclass(frozen=True)
class Envelope:
    """Delay, attack, hold, decay and release in seconds; `fall` is how far the decay goes, of its full scale."""

    delay: float
    attack: float
    hold: float
    decay: float
    fall: float
    release: float

    @classmethod
    def at(cls, first: int, value: Callable[[int], int]) -> Envelope:
        """Six generators in a row; the times are in timecents, the fall in tenths of a percent (or of a decibel)."""
        delay, attack, hold, decay, _, release = (_seconds(value(first + k)) for k in range(6))
        return cls(delay, attack, hold, decay, min(max(value(first + 4), 0), 1000) / 1000, release)


@dataclass(frozen=True)
class Zone:
    """One sample with the keys and velocities it answers to and how it is to be played."""

    keys: tuple[int, int]
    velocities: tuple[int, int]
    wave: np.ndarray  # float32, from the first sample to the last
    loop: tuple[int, int] | None  # places in `wave`
    rate: int
    root: int
    tune_cents: float
    cents_per_key: float
    gain: float
    volume: Envelope
    filter: Envelope
    cutoff_cents: float  # above 8.176 Hz
    cutoff_sweep_cents: float  # what the filter's envelope adds at its top
    resonance_db: float
    pan: float = 0.0  # -0.5 left, 0.5 right
    is_side: bool = False  # one half of a stereo sample: mono takes it with half its gain


class SoundFont:
    """A parsed file. `presets` names what it can play, by (bank, program)."""

    def __init__(self, tables: dict[str, np.ndarray], samples: np.ndarray) -> None:
        self.tables = tables
        self.samples = samples
        heads = tables["phdr"][:-1]
        self._zones: dict[tuple[int, int], list[Zone]] = {}
        self.presets = {(int(h["bank"]), int(h["program"])): _text(h["name"]) for h in heads}

    @classmethod
    def parse(cls, data: bytes) -> SoundFont:
        """A font out of the bytes of a .sf2 file; DataError where they are damaged or something else."""
        if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"sfbk":
            problem = f"not a sound font: {len(data)} bytes starting with {data[:4]!r}, not RIFF"
            raise DataError(f"{problem}; pass a .sf2", code="bad-font")
        chunks = _chunks(data, 12, len(data))
        missing = [name for name in (*_RECORDS, "smpl") if name not in chunks]
        if missing:
            raise _damaged(f"it has no {', '.join(missing)}")
        tables = {}
        for name, record in _RECORDS.items():
            num_bytes = len(chunks[name])
            if not num_bytes or num_bytes % record.itemsize:
                raise _damaged(f"{name} is {num_bytes} bytes, not a multiple of {record.itemsize}")
            tables[name] = np.frombuffer(chunks[name], record)
        for name, field, into in _POINTERS:
            places = tables[name][field].astype(np.int64)
            if (np.diff(places) < 0).any() or places[-1] > len(tables[into]) - (field == "bag"):
                raise _damaged(f"{name} points outside the {len(tables[into])} records of {into}")
        smpl = chunks["smpl"]
        return cls(tables, np.frombuffer(smpl, "<i2", len(smpl) // 2))

    def zones(self, program: int = 0, bank: int = 0) -> list[Zone]:
        """Every zone of a preset: its own zones crossed with those of its instruments, global zones applied."""
        if (bank, program) in self._zones:
            return self._zones[bank, program]
        if (bank, program) not in self.presets:
            known = sorted(p for b, p in self.presets if b == bank) or "nothing"
            problem = f"the sound font has no program {program} in bank {bank}"
            raise DataError(f"{problem}; there it has {known}", code="no-program")
        heads = self.tables["phdr"]
        index = int(np.flatnonzero((heads["bank"][:-1] == bank) & (heads["program"][:-1] == program))[0])
        zones = []
        for outer in self._bags("p", int(heads["bag"][index]), int(heads["bag"][index + 1]), _INSTRUMENT):
            number, instruments = outer[_INSTRUMENT], self.tables["inst"]
            if not 0 <= number < len(instruments) - 1:
                raise _damaged(f"preset {self.presets[bank, program]} asks for instrument {number}")
            bags = instruments["bag"][number : number + 2]
            for inner in self._bags("i", int(bags[0]), int(bags[1]), _SAMPLE):
                if (zone := self._zone(outer, inner)) is not None:
                    zones.append(zone)
        self._zones[bank, program] = zones
        return zones

    def nearest(self, program: int, bank: int) -> tuple[int, int] | None:
        """The preset, as (program, bank), to play where the font may lack this one; None for drums it has none of.

        Another drum kit is replaced by the first one, another bank by bank 0, another program by program 0.
        """
        wishes = [(program, bank), (0, bank)] if bank == DRUM_BANK else [(program, bank), (program, 0), (0, 0)]
        return next((wish for wish in wishes if wish[::-1] in self.presets), None)

    def _bags(self, level: str, first: int, last: int, target: int) -> list[dict[int, int]]:
        """The generators of each zone that names a target; a first one that names none is global: their default."""
        places, gens = self.tables[f"{level}bag"]["gen"], self.tables[f"{level}gen"]
        shared: dict[int, int] = {}
        zones = []
        for bag in range(first, last):
            records = gens[places[bag] : places[bag + 1]]
            given = dict(zip(records["kind"].tolist(), records["amount"].tolist()))
            if target in given:
                zones.append(shared | given)
            elif bag == first:
                shared = given
        return zones

    def _zone(self, outer: dict[int, int], inner: dict[int, int]) -> Zone | None:
        """An instrument's zone as a preset's zone shifts it; None when no key or velocity is left to it."""

        def value(kind: int) -> int:
            return inner.get(kind, _DEFAULTS.get(kind, 0)) + outer.get(kind, 0)

        def overlap(kind: int) -> tuple[int, int]:  # a range is two bytes in one word, low and high; 0 to 127 without
            ranges = [given.get(kind, 127 << 8) for given in (outer, inner)]
            return max(r & 255 for r in ranges), min(r >> 8 & 255 for r in ranges)

        keys, velocities = overlap(_KEYS), overlap(_VELOCITIES)
        number, heads = inner[_SAMPLE], self.tables["shdr"]
        if not 0 <= number < len(heads) - 1:
            raise _damaged(f"a zone asks for sample {number} of {len(heads) - 1}")
        head = heads[number]
        if keys[0] > keys[1] or velocities[0] > velocities[1] or head["kind"] & _ROM:
            return None
        wave, loop = self._sample(head, inner)
        root = inner.get(58, -1)
        if root < 0:
            root = int(head["root"]) if head["root"] <= 127 else 60
        # Hardware of the authors' day, and FluidSynth with it, takes 0.4 of a zone's attenuation.
        loss_db = 0.4 * max(value(48), 0) / 10
        is_side = bool(head["kind"] & _LEFT_OR_RIGHT)
        return Zone(
            keys, velocities, wave, loop, int(head["rate"]), root,
            tune_cents=100.0 * value(51) + value(52) + int(head["correction"]),
            cents_per_key=float(value(56)),
            gain=10 ** (-loss_db / 20) * (0.5 if is_side else 1.0),
            volume=Envelope.at(33, value), filter=Envelope.at(25, value),
            cutoff_cents=float(value(8)), cutoff_sweep_cents=float(value(11)),
            resonance_db=min(max(value(9), 0), 960) / 10,
            pan=min(max(value(17), -500), 500) / 1000, is_side=is_side,
        )  # fmt: skip

    def _sample(self, head: np.void, given: dict[int, int]) -> tuple[np.ndarray, tuple[int, int] | None]:
        """The samples of a header as float32, and the loop if there is one; a zone may move all four ends."""
        ends = ((head["start"], 0, 4), (head["end"], 1, 12), (head["loop_start"], 2, 45), (head["loop_end"], 3, 50))
        start, end, loop_start, loop_end = (int(at) + given.get(f, 0) + 32768 * given.get(c, 0) for at, f, c in ends)
        name = _text(head["name"])
        if head["kind"] & _COMPRESSED:
            problem = f"sample {name} of the sound font is compressed (SF3)"
            raise DataError(f"{problem}; use a plain .sf2 file", code="not-supported")
        if not 0 <= start < end <= len(self.samples) or head["rate"] == 0:
            raise _damaged(f"sample {name} is {start}:{end} of {len(self.samples)} at {head['rate']} Hz")
        wave = self.samples[start:end].astype(np.float32) / np.float32(32768)
        is_loop = given.get(54, 0) & 1 and start <= loop_start < loop_end <= end
        return wave, (loop_start - start, loop_end - start) if is_loop else None


@functools.lru_cache(maxsize=1)
def default() -> SoundFont:
    """The General MIDI font of a pinned package, fetched on first use and kept as long as the process."""
    return SoundFont.parse(default_bytes())


def default_bytes() -> bytes:
    """The file of that font, for another player."""
    from rung.data.wheel import PRETTY_MIDI

    return PRETTY_MIDI.open(MEMBER)


def render(
    font: SoundFont, notes: Notes, *, program: int = 0, bank: int = 0, sample_rate: int = 24000, tail_s: float = 1.0
) -> np.ndarray:
    """Mono float32 up to `tail_s` after the last note's end, its highest peak at 0.9."""
    return normalise(mix(font, notes, program=program, bank=bank, sample_rate=sample_rate, tail_s=tail_s))


def normalise(sound: np.ndarray, peak: float = 0.9) -> np.ndarray:
    """The same sound with its highest peak there; silence stays silence."""
    highest = float(np.abs(sound).max(initial=0.0))
    return sound * np.float32(peak / highest) if highest > 0 else sound


def mix(
    font: SoundFont, notes: Notes, *, program: int = 0, bank: int = 0, sample_rate: int = 24000, tail_s: float = 1.0
) -> np.ndarray:
    """As render, without the normalisation, so that several programs can be added before it."""
    start, end, pitch, velocity = columns(notes)
    sound = np.zeros(round((float(end.max(initial=0.0)) + tail_s) * sample_rate), np.float32)
    first = np.rint(start * sample_rate).astype(np.int64)
    held = np.maximum(np.rint(end * sample_rate).astype(np.int64) - first, 1)
    zones = font.zones(program, bank)
    for key in np.unique(pitch).tolist():
        for zone in zones:
            if not zone.keys[0] <= key <= zone.keys[1]:
                continue
            low, high = zone.velocities
            mine = np.flatnonzero((pitch == key) & (velocity >= low) & (velocity <= high))
            if mine.size:
                gain = zone.gain * (velocity[mine] / 127.0) ** 2  # SF2 2.01, 8.4.1: 40 dB for a tenth of the velocity
                played = _voices(zone, key, sample_rate, first[mine], held[mine], gain.astype(np.float32), len(sound))
                for at, wave in played:
                    sound[at : at + len(wave)] += wave
    _fade(sound, tail_s, sample_rate)
    return sound


def _fade(sound: np.ndarray, tail_s: float, sample_rate: int) -> None:
    """A release longer than the tail must not end in a click."""
    fade = min(round(min(0.01, tail_s) * sample_rate), sound.shape[-1])
    sound[..., sound.shape[-1] - fade :] *= np.linspace(1, 0, fade, dtype=np.float32)


def perform(font: SoundFont, performance: Performance, *, sample_rate: int = 24000, tail_s: float = 1.0) -> np.ndarray:
    """Stereo float32 (samples, 2) of all channels, up to `tail_s` after the last note's end, not normalised.

    Presets that the font lacks are replaced by the nearest; `replaced` counts their notes.
    """
    end_s = max((float(columns(channel.notes)[1].max(initial=0.0)) for channel in performance.values()), default=0.0)
    sound = np.zeros((2, round((end_s + tail_s) * sample_rate)), np.float32)
    for _, channel in sorted(performance.items()):
        programs = channel.notes["program"] + 256 * channel.notes["bank"].astype(np.int64)
        for number in np.unique(programs).tolist():
            if (preset := font.nearest(number % 256, number // 256)) is not None:
                _perform(sound, font.zones(*preset), channel, channel.notes[programs == number], sample_rate)
    _fade(sound, tail_s, sample_rate)
    return np.ascontiguousarray(sound.T)


def replaced(font: SoundFont, performance: Performance) -> Counter[tuple[int, int]]:
    """By (program, bank) that the font lacks, how many notes `perform` plays with another one, or leaves out."""
    counts: Counter[tuple[int, int]] = Counter()
    for channel in performance.values():
        counts.update(zip(channel.notes["program"].tolist(), channel.notes["bank"].tolist()))
    return Counter({wish: num for wish, num in counts.items() if font.nearest(*wish) != wish})


def _perform(sound: np.ndarray, zones: list[Zone], channel: Channel, notes: np.ndarray, sample_rate: int) -> None:
    """Adds the notes of one program to left and right."""
    start, end, pitch, velocity = columns(notes)
    first = np.rint(start * sample_rate).astype(np.int64)
    held = np.maximum(np.rint(end * sample_rate).astype(np.int64) - first, 1)
    # Volume and expression in one: 40 log10(v / 127) dB each. Pan: 0 and 1 are left, 64 the middle, 127 right.
    changes, (volume, expression, pan) = _merged(sample_rate, channel.volume, channel.expression, channel.pan)
    level = (np.clip(volume, 0, 127) * np.clip(expression, 0, 127) / 127.0**2) ** 2
    place = (np.clip(pan, 1, 127) - 1) / 126
    bend_at, (bend,) = _merged(sample_rate, channel.bend)
    ramp = max(round(RAMP_S * sample_rate), 1)
    for key in np.unique(pitch).tolist():
        for zone in zones:
            low, high = zone.velocities
            mine = np.flatnonzero((pitch == key) & (velocity >= low) & (velocity <= high))
            if not zone.keys[0] <= key <= zone.keys[1] or not mine.size:
                continue
            gain = (zone.gain * (2 if zone.is_side else 1) * (velocity[mine] / 127.0) ** 2).astype(np.float32)
            angle = np.clip(place + zone.pan, 0, 1) * (np.pi / 2)  # equal power: the middle is 3 dB down on both sides
            sides = (np.cos(angle) * level).astype(np.float32), (np.sin(angle) * level).astype(np.float32)
            # How a note is bent; one whose bend changes before its release is over goes alone.
            until = np.minimum(first[mine] + held[mine] + _num_release(zone, sample_rate), sound.shape[1])
            begin, stop = (np.searchsorted(bend_at, at, side="right") - 1 for at in (first[mine], until - 1))
            begin, stop = np.maximum(begin, 0), np.maximum(stop, 0)
            is_steady = begin == stop
            groups: list[tuple[np.ndarray, float | np.ndarray]] = [
                (np.flatnonzero(is_steady & (bend[begin] == value)), float(value))
                for value in np.unique(bend[begin[is_steady]])
            ]
            for which in np.flatnonzero(~is_steady):
                edges = np.clip([*bend_at[begin[which] + 1 : stop[which] + 1], until[which]], first[mine[which]], None)
                lengths = np.diff(edges, prepend=first[mine[which]])
                curve = np.repeat(bend[begin[which] : stop[which] + 1], lengths.astype(np.int64))
                groups.append((np.array([which]), curve))
            for group, bends in groups:
                some = mine[group]
                played = _voices(zone, key, sample_rate, first[some], held[some], gain[group], sound.shape[1], bends)
                for at, wave in played:
                    num = len(wave)
                    # The level of each side, a number where nothing changes. A ramp ends where the change is due, so
                    # that a note which starts there has the new level at once.
                    now, last = np.searchsorted(changes, (at, at + num + ramp), side="right") - 1
                    now = max(now, 0)
                    for side, levels in zip(sound, sides):
                        if now >= last:
                            side[at : at + num] += wave * levels[now]
                            continue
                        due = changes[now + 1 : last + 1] - at
                        since = np.maximum(due - ramp, np.append(-ramp, due[:-1]))
                        points = np.stack([since, due], 1).ravel()
                        steps = np.stack([levels[now:last], levels[now + 1 : last + 1]], 1).ravel()
                        side[at : at + num] += wave * np.interp(np.arange(num), points, steps).astype(np.float32)


def _merged(sample_rate: int, *curves: Curve) -> tuple[np.ndarray, list[np.ndarray]]:
    """The samples at which any of the curves changes, and the value of each from there on."""
    at = np.unique(np.concatenate([np.rint(curve.times * sample_rate) for curve in curves])).astype(np.int64)
    found = []
    for curve in curves:  # of changes within one sample the last counts
        found.append(Curve(np.rint(curve.times * sample_rate), curve.values).at(at))
    return at, found


def _voices(
    zone: Zone, key: int, sample_rate: int, first: np.ndarray, held: np.ndarray, gain: np.ndarray, num_samples: int,
    bend: float | np.ndarray = 0.0,
) -> Iterator[tuple[int, np.ndarray]]:  # fmt: skip
    """All notes of one key, two waves each: what is held under the zone's envelope, the release from the level reached.

    Yields where a wave begins and its samples, none beyond `num_samples`. `bend` is in semitones, one for all or, of a
    single note, one for each sample.
    """
    v = zone.volume
    times = np.arange(_num_release(zone, sample_rate)) / sample_rate
    release = _decibels(times * (FULL_DB / v.release))
    longest = int(np.minimum(held + len(release), num_samples - first).max())
    if v.fall * FULL_DB >= SILENT_DB:  # it dies away by itself
        longest = min(longest, int((v.delay + v.attack + v.hold + v.decay * SILENT_DB / FULL_DB) * sample_rate) + 1)
    raw = _low_pass(_resample(zone, key, longest, sample_rate, bend), zone, sample_rate)
    # The level while held: silent, a straight rise, full, then a straight fall in decibels.
    since_top = np.arange(len(raw), dtype=np.float32) / np.float32(sample_rate) - np.float32(
        v.delay + v.attack + v.hold
    )
    level = _decibels(np.clip(since_top * np.float32(FULL_DB / v.decay), 0, np.float32(FULL_DB * v.fall)))
    early = np.arange(min(round((v.delay + v.attack) * sample_rate) + 1, len(raw))) / sample_rate
    level[: len(early)] *= np.clip((early - v.delay) / v.attack, 0, 1).astype(np.float32)
    under = raw * level
    for at, num_held, loud in zip(first.tolist(), held.tolist(), gain):
        num = min(num_held, len(raw), num_samples - at)
        yield at, under[:num] * loud
        at += num
        tail = min(len(release), len(raw) - num, num_samples - at)
        if tail > 0:
            yield at, raw[num : num + tail] * (release[:tail] * (loud * level[num - 1]))


def _num_release(zone: Zone, sample_rate: int) -> int:
    """Samples until a release is not heard any more."""
    return round(zone.volume.release * SILENT_DB / FULL_DB * sample_rate) + 1


def _resample(zone: Zone, key: int, num: int, sample_rate: int, bend: float | np.ndarray = 0.0) -> np.ndarray:
    """`num` samples of a key at the wanted rate, fewer where an unlooped sample ends; cubic Hermite in between."""
    cents = np.clip((key - zone.root) * zone.cents_per_key + zone.tune_cents + 100 * bend, -15000, 15000)
    step = zone.rate / sample_rate * 2.0 ** (cents / 1200)  # beyond, the file is nonsense
    wave = zone.wave
    if zone.loop is None:
        num = min(num, int((len(wave) - 1) / np.min(step)) + 1)
        table = np.concatenate([wave[:1], wave, np.zeros(3, np.float32)])
    else:
        begin, end = zone.loop
        table = np.concatenate([wave[:1], wave[:end], np.resize(wave[begin:end], 3)])
    if isinstance(bend, np.ndarray):  # a bend that changes: the steps add up
        place = np.append(0.0, np.cumsum(step[: num - 1]))
        if zone.loop is None:
            place = place[place <= len(wave) - 1]
    else:
        place = np.arange(num) * step
    if zone.loop is not None and len(place) and place[-1] >= end + 1:
        # Folded one sample late: the neighbour on the left then also comes from inside the loop.
        past = place[int(np.searchsorted(place, end + 1)) :]
        past[:] = begin + 1 + (past - (begin + 1)) % (end - begin)
    whole = place.astype(np.int64)
    t = (place - whole).astype(np.float32)
    y0, y1, y2, y3 = (table[whole + k] for k in range(4))  # the table begins one sample early
    slope1, slope2 = (y2 - y0) * np.float32(0.5), (y3 - y1) * np.float32(0.5)
    rise = y2 - y1
    cubic = slope1 + slope2 - 2 * rise
    return ((cubic * t + (rise - slope1 - cubic)) * t + slope1) * t + y1


def _low_pass(raw: np.ndarray, zone: Zone, sample_rate: int) -> np.ndarray:
    """A two-pole low-pass whose cutoff follows the filter's envelope, by blocks of 43 ms that overlap by half."""
    highest = max(zone.cutoff_cents, zone.cutoff_cents + zone.cutoff_sweep_cents)
    lowest = min(zone.cutoff_cents, zone.cutoff_cents + zone.cutoff_sweep_cents)
    if not len(raw) or (lowest >= 13500 and highest >= 13500):  # 20 kHz: the format's way to say no filter
        return raw
    hop = 512 if sample_rate < 32000 else 1024
    num_blocks = -(-len(raw) // hop) + 1
    padded = np.zeros((num_blocks + 1) * hop, np.float32)
    padded[hop : hop + len(raw)] = raw
    window = np.hanning(2 * hop + 1)[:-1].astype(np.float32)  # windows at distance hop add up to one
    blocks = np.lib.stride_tricks.sliding_window_view(padded, 2 * hop)[::hop] * window
    # The first block holds sound only in its second half.
    times = np.maximum(np.arange(num_blocks) * hop, hop // 2) / sample_rate
    # The filter's envelope at these times, 0 to 1; its decay is straight.
    e = zone.filter
    sweep = np.clip((times - e.delay) / e.attack, 0, 1)
    sweep = sweep - np.clip((times - e.delay - e.attack - e.hold) / e.decay, 0, e.fall)
    cents = zone.cutoff_cents + zone.cutoff_sweep_cents * sweep
    cutoff = np.clip(8.176 * 2.0 ** (cents / 1200), 20.0, 0.45 * sample_rate).astype(np.float32)
    ratio = np.fft.rfftfreq(2 * hop, 1 / sample_rate).astype(np.float32) / cutoff[:, None]
    sharpness = 10 ** ((zone.resonance_db - 3.01) / 20)  # SF2 2.01, 8.1.2 (9): no resonance means no bump at all
    response = np.float32(10 ** (-zone.resonance_db / 40)) / (1 - ratio * ratio + np.complex64(1j / sharpness) * ratio)
    done = np.fft.irfft(np.fft.rfft(blocks) * response, 2 * hop).astype(np.float32)
    rows = np.zeros((num_blocks + 1, hop), np.float32)
    rows[:-1] = done[:, :hop]
    rows[1:] += done[:, hop:]
    return rows.reshape(-1)[hop : hop + len(raw)]


def _decibels(loss: np.ndarray) -> np.ndarray:
    return np.exp(loss.astype(np.float32) * np.float32(-np.log(10) / 20))


def _seconds(timecents: int) -> float:
    """SF2 2.01, 8.1.3: 1 ms to 100 s."""
    return float(2.0 ** (min(max(timecents, -12000), 8000) / 1200))


def columns(notes: Notes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Start, end, pitch and velocity, checked to be fit for playing; DataError says what is not."""
    start, end = (np.asarray(notes[name], np.float64) for name in ("start", "end"))
    pitch, velocity = (np.asarray(notes[name]).astype(np.int64) for name in ("pitch", "velocity"))
    if not (np.isfinite(start).all() and np.isfinite(end).all()) or (start < 0).any() or (end < start).any():
        problem = "a note starts before 0, ends before its start or has no finite time"
        raise DataError(f"{problem}; give 0 <= start <= end", code="bad-note")
    for name, values in (("pitch", pitch), ("velocity", velocity)):
        if len(bad := values[(values < 0) | (values > 127)]):
            raise DataError(f"a note has {name} {bad[0]}; MIDI has 0 to 127", code="bad-note")
    if end.max(initial=0.0) > LONGEST_S:
        problem = f"the last note ends at {end.max():.0f} s, more than {LONGEST_S:.0f} s"
        raise DataError(f"{problem}; render it in parts", code="too-large")
    return start, end, pitch, velocity


def _chunks(data: bytes, at: int, end: int) -> dict[str, bytes]:
    """The leaves of a RIFF tree by name."""
    leaves: dict[str, bytes] = {}
    while at + 8 <= end:
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if at + 8 + size > end:
            raise _damaged(f"chunk {name!r} needs {size} bytes, {end - at - 8} are left")
        if name == b"LIST":
            leaves |= _chunks(data, at + 12, at + 8 + size)
        else:
            leaves[name.decode("latin-1")] = data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    return leaves


def _damaged(how: str) -> DataError:
    return DataError(f"the sound font is damaged: {how}; fetch it again", code="font-damaged")


def _text(name: bytes) -> str:
    return name.split(b"\0")[0].decode("latin-1").strip()
