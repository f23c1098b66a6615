"""If this fails, a note sounds at the wrong pitch, loudness or length, or a damaged sound font ends in a traceback."""

from __future__ import annotations

import shutil
import struct
import subprocess
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data import soundfont
from rung.data.midi import PLAYED, Channel, Curve
from rung.data.soundfont import SoundFont, mix, perform, render, replaced
from rung.errors import DataError
from tests.errors import raises_code

NOTE = np.dtype([("start", "f8"), ("end", "f8"), ("pitch", "u1"), ("velocity", "u1")])
Gens = dict[int, int]
RATE, CYCLE, ROOT = 22050, 100, 69
SINE_HZ = RATE / CYCLE  # what the hand-made sample sounds like when played as it is
SUSTAINED: Gens = {54: 1, 37: 0, 38: -2400}  # looped, no fall, a quarter second of release


def notes(*rows: tuple[float, float, int, int]) -> np.ndarray:
    return np.array(list(rows), dtype=NOTE)


def sine(num_cycles: int = 4, scale: float = 0.5) -> np.ndarray:
    return np.rint(32767 * scale * np.sin(2 * np.pi * np.arange(num_cycles * CYCLE) / CYCLE)).astype("<i2")


def chunk(name: str, body: bytes) -> bytes:
    return name.encode() + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def font_bytes(
    zones: list[Gens],
    waves: list[np.ndarray] | None = None,
    preset: list[Gens] | None = None,
    kinds: tuple[int, ...] = (1, 1),
) -> bytes:
    """A sound font of one preset and one instrument; a zone without generator 53 is global."""
    waves = [sine()] if waves is None else waves
    preset = [{41: 0}] if preset is None else preset

    def tables(level: str, given: list[Gens]) -> bytes:
        bags, gens = [], b""
        for zone in given:
            bags.append(len(gens) // 4)
            gens += b"".join(struct.pack("<HH", k, v & 0xFFFF) for k, v in sorted(zone.items()))
        bag = b"".join(struct.pack("<HH", at, 0) for at in [*bags, len(gens) // 4])
        return chunk(f"{level}bag", bag) + chunk(f"{level}mod", bytes(10)) + chunk(f"{level}gen", gens + bytes(4))

    heads, samples = b"", b""
    for number, one in enumerate(waves):
        at = len(samples) // 2
        ends = (at, at + len(one), at + CYCLE, at + 3 * CYCLE)
        heads += struct.pack("<20sIIIIIBbHH", b"sine", *ends, RATE, ROOT, 0, 1 - number, kinds[number])
        samples += one.tobytes()
    phdr = struct.pack("<20sHHH12x", b"Test", 0, 0, 0) + struct.pack("<20sHHH12x", b"EOP", 0, 0, len(preset))
    inst = struct.pack("<20sH", b"Test", 0) + struct.pack("<20sH", b"EOI", len(zones))
    pdta = chunk("phdr", phdr) + tables("p", preset) + chunk("inst", inst) + tables("i", zones)
    pdta += chunk("shdr", heads + bytes(46))
    body = chunk("LIST", b"INFO" + chunk("ifil", struct.pack("<HH", 2, 1)))
    body += chunk("LIST", b"sdta" + chunk("smpl", samples)) + chunk("LIST", b"pdta" + pdta)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"sfbk" + body


def font(*zones: Gens, preset: list[Gens] | None = None) -> SoundFont:
    return SoundFont.parse(font_bytes(list(zones), preset=preset))


def peak_hz(sound: np.ndarray, sample_rate: int, low: float = 0, high: float = 1e9) -> float:
    """The strongest frequency in a band, by a padded FFT and a parabola through its three highest points."""
    size = 1 << 19
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound)), size))
    hz = np.fft.rfftfreq(size, 1 / sample_rate)
    spectrum[(hz < low) | (hz > high)] = 0
    at = int(spectrum.argmax())
    left, top, right = np.log(spectrum[at - 1 : at + 2])
    return float(hz[1] * (at + (left - right) / (left - 2 * top + right) / 2))


def energy(sound: np.ndarray) -> float:
    return float((sound.astype(np.float64) ** 2).sum())


@pytest.fixture(scope="module")
def general_midi() -> SoundFont:
    try:
        return soundfont.default()
    except DataError as error:
        pytest.skip(f"needs the sound font of the pretty_midi wheel: {error}")


# A sample whose frequency and loop are known ------------------------------------------------------------------------


@pytest.mark.parametrize("sample_rate", [16000, 24000, 44100])
@pytest.mark.parametrize("key", [45, 69, 70, 93])
def test_looped_sine_has_the_exact_frequency(key: int, sample_rate: int) -> None:
    sound = render(font({**SUSTAINED, 53: 0}), notes((0, 2, key, 100)), sample_rate=sample_rate)
    want = SINE_HZ * 2 ** ((key - ROOT) / 12)
    assert peak_hz(sound[: 2 * sample_rate], sample_rate) == pytest.approx(want, rel=2e-4)


def test_loop_has_no_seam() -> None:
    sound = mix(font({**SUSTAINED, 53: 0}), notes((0, 1, 64, 127)), sample_rate=24000)
    times = np.arange(1000, 23000) / 24000
    want = 0.5 * np.sin(2 * np.pi * SINE_HZ * 2 ** (-5 / 12) * times)
    assert np.abs(sound[1000:23000] - want).max() < 2e-4


@pytest.mark.parametrize(
    ("gens", "cents"),
    [({58: 57}, 1200), ({51: 3}, 300), ({52: -25}, -25), ({56: 50}, -250), ({56: 0}, 0), ({58: 60, 51: -1}, 800)],
)
def test_tuning_generators(gens: Gens, cents: float) -> None:
    key = 64 if 56 in gens else ROOT  # scale tuning is only heard away from the root
    sound = render(font({**SUSTAINED, **gens, 53: 0}), notes((0, 2, key, 100)))
    assert 1200 * np.log2(peak_hz(sound[:48000], 24000) / SINE_HZ) == pytest.approx(cents, abs=0.5)


def test_unlooped_sample_ends() -> None:
    sound = mix(font({53: 0}), notes((0, 1, ROOT, 127)), sample_rate=RATE)
    assert np.abs(sound[:390]).max() > 0.4
    assert not sound[402:].any()


@pytest.mark.parametrize(("kind", "low", "high"), [(43, 60, 72), (44, 30, 90)])
def test_zones_answer_to_their_range_only(kind: int, low: int, high: int) -> None:
    one = font({**SUSTAINED, kind: low | high << 8, 53: 0})
    for value in (low - 1, low, high, high + 1):
        row = (0.0, 0.2, value, 100) if kind == 43 else (0.0, 0.2, ROOT, value)
        assert mix(one, notes(row)).any() == (low <= value <= high), value


def test_global_zones_are_defaults_and_presets_add() -> None:
    """Instrument: the zone's own value wins over the global one. Preset: values add; ranges narrow."""
    plain, tuned = {**SUSTAINED, 53: 0}, {**SUSTAINED, 51: 2, 53: 0}
    global_zone: Gens = {51: 7}
    row = notes((0, 2, ROOT, 100))
    for zones, preset, semitones in (
        ([global_zone, plain], [{41: 0}], 7),
        ([global_zone, tuned], [{41: 0}], 2),
        ([global_zone, tuned], [{51: 1, 41: 0}], 3),
        ([global_zone, tuned], [{51: 5}, {41: 0}], 7),
        ([global_zone, tuned], [{51: 5}, {51: 1, 41: 0}], 3),
    ):
        hz = peak_hz(render(font(*zones, preset=preset), row)[:48000], 24000)
        assert 12 * np.log2(hz / SINE_HZ) == pytest.approx(semitones, abs=0.01)
    narrow = font(plain, preset=[{43: 0 | 60 << 8, 41: 0}])
    assert not mix(narrow, row).any()


def test_attenuation_and_velocity_set_the_level() -> None:
    quiet, loud = (mix(font({**SUSTAINED, 48: c, 53: 0}), notes((0, 1, ROOT, 127)))[2000:20000] for c in (250, 0))
    assert 20 * np.log10(np.abs(loud).max() / np.abs(quiet).max()) == pytest.approx(10, abs=0.05)  # 0.4 of 25 dB
    one = font({**SUSTAINED, 53: 0})
    levels = [np.abs(mix(one, notes((0, 1, ROOT, v)))).max() for v in (20, 40, 80, 127)]
    assert levels == sorted(levels)
    assert levels[2] / levels[1] == pytest.approx(4, rel=1e-3)


def test_envelope_follows_its_generators() -> None:
    """Attack 0.5 s, hold 0.25 s, decay 100 dB/s down to -20 dB, release 100 dB in 0.5 s."""
    one = font({54: 1, 34: -1200, 35: -2400, 36: 0, 37: 200, 38: -1200, 53: 0})
    sound = np.abs(mix(one, notes((0, 1.5, ROOT, 127)), sample_rate=24000))

    def level_db(time_s: float) -> float:
        at = round(time_s * 24000)
        return float(20 * np.log10(sound[at - 110 : at + 110].max() / 0.5))

    for time_s, want in ((0.25, -6), (0.6, 0), (0.85, -10), (1.2, -20), (1.45, -20), (1.6, -40), (1.7, -60)):
        assert level_db(time_s) == pytest.approx(want, abs=0.8), time_s


def test_filter_takes_what_lies_above_it() -> None:
    row = notes((0, 1, ROOT + 36, 127))
    low, high = (mix(font({**SUSTAINED, 8: c, 53: 0}), row)[4000:20000] for c in (6900, 13500))
    ratio = 8 * SINE_HZ / (8.176 * 2 ** (6900 / 1200))
    want_db = -10 * np.log10(1 + ratio**4)  # two poles without resonance
    assert 10 * np.log10(energy(low) / energy(high)) == pytest.approx(want_db, abs=0.3)


def test_linked_stereo_halves_are_averaged() -> None:
    left, right = sine(scale=0.6), sine(scale=0.2)
    pair = SoundFont.parse(
        font_bytes([{**SUSTAINED, 17: -500, 53: 0}, {**SUSTAINED, 17: 500, 53: 1}], [left, right], kinds=(4, 2))
    )
    sound = mix(pair, notes((0, 1, ROOT, 127)))
    assert np.abs(sound).max() == pytest.approx(0.4, abs=2e-3)


# Notes --------------------------------------------------------------------------------------------------------------


def test_polyphony_is_a_sum_and_order_does_not_matter() -> None:
    one = font({**SUSTAINED, 53: 0})
    a, b, c = (0.0, 0.6, 60, 90), (0.2, 0.9, 60, 50), (0.25, 1.0, 67, 100)
    together = mix(one, notes(a, b, c))
    alone = np.zeros_like(together)
    for row in (a, b, c):
        part = mix(one, notes(row), tail_s=2.0 - row[1])
        alone += part[: len(together)]
    assert np.allclose(together, alone, atol=1e-6)
    assert np.allclose(together, mix(one, notes(c, b, a)), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.floats(0, 1), st.integers(0, 127), st.integers(0, 127)), min_size=1, max_size=8
    ),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_length_peak_and_repeatability(rows: list[tuple[float, float, int, int]], tail_s: float) -> None:
    one = font({**SUSTAINED, 53: 0})
    given_notes = notes(*((start, start + length, pitch, velocity) for start, length, pitch, velocity in rows))
    sound = render(one, given_notes, tail_s=tail_s)
    assert sound.dtype == np.float32
    assert len(sound) == round((given_notes["end"].max() + tail_s) * 24000)
    assert np.isfinite(sound).all()
    assert not sound.any() or np.abs(sound).max() == pytest.approx(0.9, abs=1e-5)
    assert sound.tobytes() == render(one, given_notes, tail_s=tail_s).tobytes()


def test_plain_columns_and_no_notes() -> None:
    one = font({**SUSTAINED, 53: 0})
    columns = {"start": np.array([0.0]), "end": np.array([0.5]), "pitch": np.array([60]), "velocity": np.array([64])}
    assert np.array_equal(render(one, columns), render(one, notes((0, 0.5, 60, 64))))
    nothing = render(one, notes(), tail_s=0.5)
    assert len(nothing) == 12000
    assert not nothing.any()


@pytest.mark.parametrize(
    "row",
    [(-0.1, 1, 60, 64), (1, 0.5, 60, 64), (0, np.nan, 60, 64), (0, np.inf, 60, 64), (0, 1e6, 60, 64), (0, 1, 200, 64)],
)
def test_notes_that_cannot_be_played(row: tuple[float, float, int, int]) -> None:
    with pytest.raises(DataError):
        render(font({53: 0}), notes(row))


# Channels in stereo --------------------------------------------------------------------------------------------------


def channel(
    *rows: tuple[float, float, int, int],
    program: int = 0,
    bank: int = 0,
    volume: list[tuple[float, float]] | None = None,
    expression: list[tuple[float, float]] | None = None,
    pan: list[tuple[float, float]] | None = None,
    bend: list[tuple[float, float]] | None = None,
) -> Channel:
    """Notes of one program; controllers as lists of (time, value)."""
    played = np.array([(*row, program, bank) for row in rows], PLAYED)
    given_curves = {"volume": volume or [(0, 127)], "expression": expression, "pan": pan, "bend": bend}
    return Channel(played, **{name: Curve.of(*points) for name, points in given_curves.items() if points})


def decibels(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(energy(a) / energy(b)))


A4_FONT = {**SUSTAINED, 52: -4, 53: 0}  # four cents flat: 219.99 Hz at the root, 439.98 Hz an octave higher
LONG = (0.0, 2.0, 81, 127)
MIDDLE = slice(2400, 45600)  # of a note of two seconds, without its ends


@pytest.mark.parametrize(("semitones", "hz"), [(0, 440.0), (2, 493.88), (1, 466.16), (-12, 220.0)])
def test_bent_notes_have_the_frequency_of_the_bend(semitones: float, hz: float) -> None:
    sound = perform(font(A4_FONT), {0: channel(LONG, bend=[(0, semitones)])})
    assert peak_hz(sound[MIDDLE, 0], 24000) == pytest.approx(hz, rel=2e-4)
    later = perform(font(A4_FONT), {0: channel(LONG, bend=[(0, 0), (1, semitones)])})
    assert peak_hz(later[2400:24000, 0], 24000) == pytest.approx(440, rel=4e-4)
    assert peak_hz(later[24000:45600, 0], 24000) == pytest.approx(hz, rel=4e-4)


def test_a_bend_is_the_integral_of_the_frequency() -> None:
    times = np.arange(0, 2, 0.02)
    semitones = 2 * np.sin(5 * times)
    sound = perform(font({**SUSTAINED, 53: 0}), {0: channel((0, 2, ROOT, 127), bend=[*zip(times, semitones)])})
    hz = SINE_HZ * 2 ** (np.repeat(semitones, 480) / 12)
    want = 0.5 * np.sin(2 * np.pi * np.append(0, np.cumsum(hz / 24000)[:-1])) * np.cos(np.pi / 4)
    assert np.abs(sound[100:47000, 0] - want[100:47000]).max() < 1e-3


def test_an_unlooped_sample_under_a_bend_ends_when_it_is_over() -> None:
    """Two octaves up from its middle: 200 samples as they are, the other 200 in a quarter of the time."""
    row, at = (0.0, 1.0, ROOT, 127), 200 / RATE
    sound = perform(font({53: 0}), {0: channel(row, bend=[(0, 0), (at, 24)])}, sample_rate=RATE)
    assert sound[150:245].any()
    assert not sound[253:].any()


def test_steady_channel_is_the_mono_mix_on_both_sides() -> None:
    rows = ((0.0, 0.6, 60, 90), (0.2, 0.9, 60, 50), (0.25, 1.0, 67, 100))
    one = font({**SUSTAINED, 53: 0})
    sound = perform(one, {0: channel(*rows, volume=[(0, 100)])})
    want = mix(one, notes(*rows)) * (100 / 127) ** 2 * np.sqrt(0.5)
    assert sound.dtype == np.float32
    assert sound.shape == (len(want), 2)
    assert np.allclose(sound, want[:, None], atol=1e-6)


@pytest.mark.parametrize("name", ["volume", "expression"])
@pytest.mark.parametrize(("value", "db"), [(64, -11.9), (32, -23.95), (127, 0.0)])
def test_level_of_volume_and_expression(name: str, value: float, db: float) -> None:
    loud = perform(font(A4_FONT), {0: channel(LONG)})
    quiet = perform(font(A4_FONT), {0: channel(LONG, **{name: [(0, value)]})})
    assert decibels(quiet, loud) == pytest.approx(db, abs=0.05)
    change = perform(font(A4_FONT), {0: channel(LONG, **{name: [(0, 127), (1, value)]})})
    assert decibels(change[2400:23760], loud[2400:23760]) == pytest.approx(0, abs=0.01)
    assert decibels(change[24000:45600], loud[24000:45600]) == pytest.approx(db, abs=0.05)


def test_a_change_of_volume_does_not_click() -> None:
    steady = perform(font(A4_FONT), {0: channel(LONG)})
    for changes in ([(0, 127), (1.0003, 20)], [(0, 127), (1.0003, 20), (1.002, 127), (1.5, 0)]):
        sound = perform(font(A4_FONT), {0: channel(LONG, volume=changes)})
        assert np.abs(np.diff(sound[:, 0])).max() < 1.1 * np.abs(np.diff(steady[:, 0])).max()
    panned = perform(font(A4_FONT), {0: channel(LONG, pan=[(0, 0), (1.0003, 127)])})
    assert np.abs(np.diff(panned, axis=0)).max() < 1.1 * np.sqrt(2) * np.abs(np.diff(steady[:, 0])).max()


def test_a_note_starts_with_what_was_set_at_its_start() -> None:
    """Not with what held before, gliding."""
    row = (1.0, 2.0, 81, 127)
    both = {"volume": [(0, 127), (1.0, 40)], "pan": [(0, 0), (1.0, 127)]}
    sound = perform(font(A4_FONT), {0: channel(row, **both)})
    want = perform(font(A4_FONT), {0: channel(row, volume=[(0, 40)], pan=[(0, 127)])})
    assert np.abs(sound - want).max() < 1e-6


@pytest.mark.parametrize(("value", "left_db", "right_db"), [(0, 0, -200), (64, -3.01, -3.01), (127, -200, 0)])
def test_pan_has_equal_power(value: float, left_db: float, right_db: float) -> None:
    alone = mix(font(A4_FONT), notes(LONG))
    sound = perform(font(A4_FONT), {0: channel(LONG, pan=[(0, value)])})
    for side, db in zip(sound.T, (left_db, right_db)):
        assert 10 * np.log10(energy(side) / energy(alone) + 1e-20) == pytest.approx(db, abs=0.02 if db > -100 else 100)
    assert energy(sound) == pytest.approx(energy(alone), rel=1e-3)


def test_channels_keep_apart() -> None:
    low, high = channel((0, 2, 69, 127), pan=[(0, 0)]), channel((0, 2, 88, 127), pan=[(0, 127)])
    sound = perform(font(A4_FONT), {0: low, 1: high})
    assert peak_hz(sound[MIDDLE, 0], 24000) == pytest.approx(220, rel=4e-4)
    assert peak_hz(sound[MIDDLE, 1], 24000) == pytest.approx(659.26, rel=4e-4)
    for number, one in ((0, low), (1, high)):
        assert np.abs(sound[:, number] - perform(font(A4_FONT), {5: one})[:, number]).max() < 1e-6


def test_stereo_samples_and_zones_keep_their_side() -> None:
    left, right = sine(scale=0.6), sine(scale=0.2)
    zones = [{**SUSTAINED, 17: -500, 53: 0}, {**SUSTAINED, 17: 500, 53: 1}]
    pair = SoundFont.parse(font_bytes(zones, [left, right], kinds=(4, 2)))
    sound = perform(pair, {0: channel((0, 1, ROOT, 127))})
    assert np.abs(sound).max(axis=0).tolist() == pytest.approx([0.6, 0.2], abs=2e-3)
    half = perform(font({**SUSTAINED, 17: -250, 53: 0}), {0: channel((0, 1, ROOT, 127))})
    assert decibels(half[:, 0], half[:, 1]) == pytest.approx(20 * np.log10(np.tan(3 * np.pi / 8)), abs=0.01)
    beyond = perform(font({**SUSTAINED, 17: -250, 53: 0}), {0: channel((0, 1, ROOT, 127), pan=[(0, 1)])})
    assert np.abs(beyond[:, 1]).max() < 1e-6


def test_presets_that_are_absent_are_replaced_and_counted() -> None:
    one, row = font(A4_FONT), (0.0, 1.0, 60, 99)
    assert (one.nearest(5, 3), one.nearest(0, 0), one.nearest(0, 128)) == ((0, 0), (0, 0), None)
    drums = channel(row, bank=128)
    assert not perform(one, {9: drums}).any()
    assert np.array_equal(perform(one, {0: channel(row, program=5, bank=3)}), perform(one, {0: channel(row)}))
    band = {0: channel(row, row, program=5, bank=3), 1: channel(row), 9: drums}
    assert replaced(one, band) == {(5, 3): 2, (0, 128): 1}


def test_kits_and_banks_of_the_real_font(general_midi: SoundFont) -> None:
    assert general_midi.nearest(56, 128) == (0, 128)
    assert general_midi.nearest(25, 128) == (25, 128)
    assert general_midi.nearest(48, 8) == (48, 0)


def test_silence_for_no_notes() -> None:
    one = font(A4_FONT)
    for performance in ({}, {0: channel()}):
        sound = perform(one, performance, tail_s=0.5)
        assert sound.shape == (12000, 2)
        assert not sound.any()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_controllers_give_a_finite_sound(data: st.DataObject) -> None:
    time = st.integers(0, 12000).map(lambda n: n / 12000)

    def curve(low: float, high: float) -> list[tuple[float, float]]:
        return sorted(data.draw(st.lists(st.tuples(time, st.floats(low, high)), max_size=6)))

    played = channel(
        *data.draw(st.lists(st.tuples(time, st.floats(1, 2), st.integers(0, 127), st.integers(1, 127)), max_size=5)),
        volume=curve(0, 127), expression=curve(0, 127), pan=curve(0, 127), bend=curve(-24, 24),
    )  # fmt: skip
    sound = perform(font(A4_FONT), {0: played}, sample_rate=8000, tail_s=0.2)
    assert np.isfinite(sound).all()
    assert np.abs(sound).max(initial=0) < 5


# Damage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"RIFF", b"MThd" + bytes(100), b"RIFF\x10\0\0\0WAVE" + bytes(40)])
def test_foreign_bytes(data: bytes) -> None:
    with raises_code("bad-font"):
        SoundFont.parse(data)


def test_missing_program_and_compressed_samples() -> None:
    with raises_code("no-program") as caught:
        render(font({53: 0}), notes((0, 1, 60, 64)), program=5)
    assert "[0]" in str(caught.value)
    with raises_code("not-supported"):
        render(SoundFont.parse(font_bytes([{53: 0}], kinds=(0x11,))), notes((0, 1, 60, 64)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_end_in_a_sentence_or_a_sound(data: st.DataObject) -> None:
    raw = bytearray(font_bytes([{51: 1}, {**SUSTAINED, 8: 6900, 11: 2000, 53: 0}]))
    del raw[data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw)))) :]
    tables = max(len(raw) - 370, 0)  # where the tables are; damage to the samples only sounds bad
    for _ in range(data.draw(st.integers(0, 4))):
        if len(raw) > tables:
            raw[data.draw(st.integers(tables, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        sound = render(SoundFont.parse(bytes(raw)), notes((0, 0.1, 60, 100)), tail_s=0.1)
    except DataError:
        return
    assert np.isfinite(sound).all()


# The real font ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [0, 24, 40, 71, 73])
@pytest.mark.parametrize("key", [48, 69, 84])
def test_real_instruments_are_in_tune(general_midi: SoundFont, program: int, key: int) -> None:
    sound = render(general_midi, notes((0, 1.5, key, 90)), program=program)[4800:28800]
    want = 440 * 2 ** ((key - 69) / 12)
    assert peak_hz(sound, 24000, 0.9 * want, 1.1 * want) == pytest.approx(want, rel=0.01)
    # The period by autocorrelation: the first lag at which the sound is as like itself as at any other. An octave too
    # high would end earlier, one too low later.
    spectrum = np.abs(np.fft.rfft(sound, 1 << 16)) ** 2
    likeness = np.fft.irfft(spectrum)[: round(24000 / want * 2.5)]
    lags = np.flatnonzero((likeness[1:-1] > likeness[:-2]) & (likeness[1:-1] >= likeness[2:])) + 1
    first = lags[likeness[lags] > 0.9 * likeness[lags].max()][0]
    assert first == pytest.approx(24000 / want, rel=0.01, abs=1)


def test_real_piano_behaves_like_one(general_midi: SoundFont) -> None:
    assert len(general_midi.presets) > 128
    soft, loud = (mix(general_midi, notes((0, 1, 60, v))) for v in (30, 110))
    assert energy(loud) > 50 * energy(soft)
    windows = loud[:48000].reshape(-1, 4800)  # 0.2 s each, key up at 1 s
    levels = [energy(w) for w in windows]
    assert levels[0] > levels[4] > 0
    assert levels[5] < 0.5 * levels[4]
    assert levels[8] < 1e-3 * levels[4]


def test_every_preset_and_key_of_the_real_font_plays(general_midi: SoundFont) -> None:
    rows = notes(*((0.01 * k, 0.01 * k + 0.05, k, 100) for k in range(24, 100, 5)))
    for bank, program in general_midi.presets:
        sound = mix(general_midi, rows, program=program, bank=bank, sample_rate=8000, tail_s=0.1)
        assert np.isfinite(sound).all()
        assert sound.any(), (bank, program)


@pytest.mark.parametrize(("program", "key"), [(0, 36), (0, 60), (0, 84), (24, 60), (73, 72)])
def test_same_wave_as_fluidsynth(general_midi: SoundFont, tmp_path: Path, program: int, key: int) -> None:
    """Parity with an independent player, up to its delay and gain. Programs without vibrato only: we have none."""
    if shutil.which("fluidsynth") is None:
        pytest.skip("needs an installed fluidsynth")
    track = bytes([0, 0xC0, program, 0, 0x90, key, 80, 0x8F, 0x00, 0x80, key, 0, 0, 0xFF, 0x2F, 0])  # 1920 ticks = 2 s
    song = b"MThd" + struct.pack(">IHHH", 6, 0, 1, 480) + b"MTrk" + struct.pack(">I", len(track)) + track
    (tmp_path / "a.mid").write_bytes(song)
    (tmp_path / "a.sf2").write_bytes(soundfont.default_bytes())
    command = ["fluidsynth", "-ni", "-q", "-R", "0", "-C", "0", "-r", "24000", "-F", "a.wav", "a.sf2", "a.mid"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        theirs = np.frombuffer(file.readframes(46000), "<i2").reshape(-1, 2).mean(axis=1)
    ours = mix(general_midi, notes((0, 2, key, 80)), program=program)[:46000].astype(np.float64)
    both = np.fft.irfft(np.fft.rfft(theirs, 1 << 17).conj() * np.fft.rfft(ours, 1 << 17))
    assert both.max() / np.sqrt(energy(theirs) * energy(ours)) > 0.998
