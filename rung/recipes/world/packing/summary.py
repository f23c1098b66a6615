"""What `rung data world` prints: counts, baselines, controls, and everything that was assumed or left out."""

from __future__ import annotations

from typing import Any

REASONS = {
    "undecodable": "do not decode",
    "every": "skipped by dataset.every",
    "split_gap": "between the splits",
    "alone": "alone, without a neighbour",
}


def summarise(info: dict[str, Any], counts: dict[str, list[int]], num_episodes: int, seconds: float) -> str:
    """`counts` are the lengths of the records of each split, `seconds` their length in time."""
    num_frames = sum(map(sum, counts.values()))
    kind = "moves between poses" if info["control_kind"] == "pose" else "controls as recorded"
    lines = [
        f"{num_frames} frames of {info['width']}x{info['height']}, {_plural(num_episodes, 'episode')}, "
        f"{seconds / 60:.1f} min at {info['rate_hz']:.4g} Hz (median); {kind}; split by {info['split_by']}"
    ]
    for split, lengths in counts.items():
        if not lengths:
            continue
        base = info["baselines"][split]
        lines.append(
            f"  {split:<10}  {sum(lengths)} frames, {_plural(len(lengths), 'record')} (longest: {max(lengths)}); "
            f"L1 of copying the last frame {base['persistence']:.4f}, of the mean frame {base['mean_frame']:.4f}"
        )
    lines += _controls(info)
    dropped = {why: number for why, number in info["dropped"].items() if number}
    if dropped:
        lines.append("left out: " + ", ".join(f"{number} {REASONS.get(why, why)}" for why, number in dropped.items()))
    return "\n".join(lines + [f"note: {note}" for note in info["notes"]])


def _controls(info: dict[str, Any]) -> list[str]:
    figures = info["statistics"]
    columns = ("mean", "std", "low", "high", "brisk")
    lines = ["  " + "control".ljust(12) + "".join(column.rjust(11) for column in columns)]
    for number, name in enumerate(info["controls"]):
        if name in figures["constant"]:
            if name != "valid":
                lines.append(f"  {name:<12}{figures['mean'][number]:>11.4g}  constant")
            continue
        lines.append(f"  {name:<12}" + "".join(f"{figures[column][number] + 0.0:>11.4g}" for column in columns))
    if info["num_unknown"]:
        lines.append(f"  {info['num_unknown']} steps have no known control and are marked as not valid")
    return lines


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
