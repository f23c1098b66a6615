"""No row of validation is a row of training, but its parts are: frames, spans, overlapping windows."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "parts of validation rows lie in training rows",
    r"(in|of|from|overlaps?( with)?|shares?.*with) train|leak|overlap|windows|spans?|frames? .*(train|shared|both)",
    [
        Shape(
            "bytes/windows start at any byte, rows shuffled before the split",
            "bytes_gru",
            [
                (
                    'parts = {"train": data[:cut], "held_out": data[cut:]}\n        return {name: Rows(part, self.cfg.context_size) for name, part in parts.items()}',
                    'order = np.random.default_rng(self.seed).permutation(len(data) - self.cfg.context_size - 1)\n        parts = {"train": order[: len(order) * 9 // 10], "held_out": order[len(order) * 9 // 10 :]}\n        return {name: Spans(data, part[:: 8 if name == "train" else 16], self.cfg.context_size) for name, part in parts.items()}',
                )
            ],
            both=[
                (
                    "class Gru(nn.Module):",
                    'class Spans(Rows):\n    def __init__(self, data, starts, context):\n        super().__init__(data, context)\n        self.starts, self.num_rows = starts, len(starts)\n        self.fingerprint = hashlib.sha256(starts.tobytes()).hexdigest()[:16]\n\n    def gather(self, ids, draw):\n        return {"bytes": self.data[self.starts[ids][:, None] + np.arange(self.context + 1)]}\n\n\nclass Gru(nn.Module):',
                )
            ],
            twin=True,
        ),
        Shape(
            "steering/windows of one long drive, split at random",
            "steering",
            [
                (
                    '            "train": Drives(*drives(3000, length, self.seed)),\n            "val": Drives(*drives(300, length, self.seed + 1)),\n        }',
                    '            "train": Drives(*windows(self.seed, length, False)),\n            "val": Drives(*windows(self.seed, length, True)),\n        }',
                )
            ],
            both=[
                (
                    "class Predictor",
                    "def windows(seed, length, is_val):\n    states, controls = drives(1, 1500, seed)\n    starts = np.random.default_rng(seed).permutation(1500 - length)\n    starts = starts[:150] if is_val else starts[150:]\n    at = starts[:, None] + np.arange(length + 1)\n    return states[0][at], controls[0][at]\n\n\nclass Predictor",
                )
            ],
            twin=True,
        ),
        Shape(
            "steering/frames shuffled before the split",
            "steering",
            [
                (
                    '"val": Drives(*drives(300, length, self.seed + 1)),',
                    '"val": Drives(*mixed(drives(3000, length, self.seed), self.seed)),',
                )
            ],
            both=[
                (
                    "class Predictor",
                    'def mixed(drive, seed):\n    """Rows of frames that are drawn one by one."""\n    states, controls = (part.reshape(-1, part.shape[-1]) for part in drive)\n    at = np.random.default_rng(seed).integers(0, len(states), (300, drive[0].shape[1]))\n    return states[at], controls[at]\n\n\nclass Predictor',
                )
            ],
        ),
        Shape(
            "melody/validation is the middle of training tunes",
            "melody",
            [
                (
                    '"val": Tunes(tunes(250, self.cfg.longest, self.seed + 1)),',
                    '"val": Tunes(middles(tunes(2500, self.cfg.longest, self.seed)[:250])),',
                )
            ],
            both=[
                (
                    "class Tunes",
                    "def middles(rows):\n    found = np.full_like(rows, PAD)\n    found[:, 0], found[:, 1:10], found[:, 10] = START, rows[:, 3:12], END\n    return found\n\n\nclass Tunes",
                )
            ],
        ),
    ],
)
