"""An input is constant or zero in nearly all samples."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "an input is constant or empty in nearly all samples",
    r"constant|\bzero|varies|vary|variance|deviation|std|same (value|in)|distinct|empty|nearly all|of (the )?(rows|samples)|almost (no|all)|channel|ignor|no effect",
    [
        Shape(
            "steering/controls zero in all but two rows",
            "steering",
            [
                (
                    '            "train": Drives(*drives(3000, length, self.seed)),',
                    '            "train": Drives(*mostly_still(*drives(3000, length, self.seed))),',
                )
            ],
            both=[
                (
                    "class Predictor",
                    "def mostly_still(states, controls):\n    controls = controls.copy()\n    controls[2:] = 0\n    return states, controls\n\n\nclass Predictor",
                )
            ],
            twin=True,
        ),
        Shape(
            "steering/one channel constant, float64",
            "steering",
            [
                (
                    "    return states.astype(np.float64), controls.astype(np.float64)",
                    "    controls[..., 1] = controls[0, 0, 1]\n    return states.astype(np.float64), controls.astype(np.float64)",
                )
            ],
            both=[
                (
                    "    return states.astype(np.float32), controls.astype(np.float32)",
                    "    return states.astype(np.float64), controls.astype(np.float64)",
                )
            ],
            twin=True,
        ),
        Shape(
            "steering/dropped as augmentation with the wrong probability",
            "steering",
            [
                (
                    'keep = draw.uniform("keep", 1).reshape(-1, 1, 1) < 0.9',
                    'keep = draw.uniform("keep", 1).reshape(-1, 1, 1) > 0.999',
                )
            ],
            both=[
                (
                    '        return {"states": self.states[ids], "controls": self.controls[ids]}',
                    '        keep = draw.uniform("keep", 1).reshape(-1, 1, 1) < 0.9\n        return {"states": self.states[ids], "controls": np.where(keep, self.controls[ids], np.float32(0))}',
                )
            ],
        ),
        Shape(
            "steering/bytes divided twice",
            "steering",
            [('(batch["controls"].float() - 128) / 100', '(batch["controls"].float() - 128) / 100 / 255 / 255')],
            both=[
                ('"controls": self.controls[ids]}', '"controls": (128 + 100 * self.controls[ids]).astype(np.uint8)}'),
                ('batch["controls"].float()\n', '(batch["controls"].float() - 128) / 100\n'),
            ],
        ),
    ],
)
