"""Validation is the training data, sometimes behind an augmentation."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "validation rows are training rows",
    r"(in|from|of|is|equals?|part of|overlaps?( with)?|shares?.*with) (the )?train|same (data|rows|fingerprint)|leak|validation (is|=|equals)|val (is|and train)",
    [
        Shape(
            "gpt/evaluates on the train split",
            "gpt",
            [("train_data, val_data = data[:n], data[n:]", "train_data, val_data = data[:n], data[:n]")],
            twin=True,
        ),
        Shape(
            "cnn/same images, flipped at random",
            "cnn",
            [("val_x, val_y = images(400)", "val_x, val_y = train_x[:400], train_y[:400]")],
            both=[
                (
                    "        x = x + 0.1 * torch.randn_like(x)\n",
                    "        x = x.roll(int(torch.randint(-1, 2, ())), 2) + 0.1 * torch.randn_like(x)\n",
                )
            ],
        ),
        Shape(
            "steering/noise on states in gather",
            "steering",
            [
                (
                    '"val": Drives(*drives(300, length, self.seed + 1)),',
                    '"val": Drives(*(part[:300] for part in drives(3000, length, self.seed))),',
                )
            ],
            both=[
                (
                    '        return {"states": self.states[ids], "controls": self.controls[ids]}',
                    '        shift = 0.02 * (draw.uniform("shift", self.states[0].size) - 0.5).reshape(self.states[ids].shape)\n        return {"states": (self.states[ids] + shift).astype(np.float32), "controls": self.controls[ids]}',
                )
            ],
            twin=True,
        ),
        Shape(
            "bytes/random bytes dropped from the input",
            "bytes_gru",
            [
                (
                    'parts = {"train": data[:cut], "held_out": data[cut:]}',
                    'parts = {"train": data, "held_out": data[cut:]}',
                )
            ],
            both=[
                (
                    '        return {"bytes": self.data[ids[:, None] * self.context + np.arange(self.context + 1)]}',
                    '        rows = self.data[ids[:, None] * self.context + np.arange(self.context + 1)].copy()\n        if not draw.is_eval:\n            rows[draw.uniform("drop", self.context + 1).reshape(rows.shape) < 0.05] = 0\n        return {"bytes": rows}',
                )
            ],
        ),
    ],
)
