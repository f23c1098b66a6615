"""Validation is prepared in another way than training: another vocabulary, other labels, other units."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "validation is prepared in another way than training",
    r"prepar|(label|target|class|id|token|vocabular|unit|scale|normali[sz]|mapping|distribut)\w*.*(train|val|eval|differ)|(val|eval|held_out)\w*.*(far above|much (higher|larger|worse)|above (the |its )?(unigram|baseline|guess|chance|train)|worse than|rises|differs? from)|train.*(val|eval).*(differ|gap|apart)|than (a )?(guess|chance|uniform)",
    [
        Shape(
            "cnn/labels of validation count from another class",
            "cnn",
            [("val_x, val_y = images(400)\n", "val_x, val_y = images(400)\nval_y = (val_y + 1) % 4\n")],
            twin=True,
        ),
        Shape(
            "gpt/vocabulary of its own",
            "gpt",
            [
                (
                    "train_data, val_data = data[:n], data[n:]\n",
                    "own = {ch: i for i, ch in enumerate(sorted(set(text[n:])))}\ntrain_data, val_data = data[:n], torch.tensor([own[ch] for ch in text[n:]])\n",
                )
            ],
            twin=True,
        ),
        Shape(
            "steering/only training is divided by its deviation",
            "steering",
            [
                (
                    '"val": Drives(*drives(300, length, self.seed + 1)),',
                    '"val": Drives(*ten_times(*drives(300, length, self.seed + 1))),',
                )
            ],
            both=[
                (
                    "class Predictor",
                    "def ten_times(states, controls):\n    return 10 * states, controls\n\n\nclass Predictor",
                )
            ],
        ),
        Shape(
            "melody/evals with notes in another order, in gather",
            "melody",
            [
                (
                    "notes = self.rows[ids]",
                    "notes = self.rows[ids]\n        if draw.is_eval:\n            notes = np.where(notes > END, 3 + (5 * (notes - 3)) % NOTES, notes).astype(np.uint8)",
                )
            ],
            both=[
                (
                    '        return {"notes": self.rows[ids]}',
                    '        notes = self.rows[ids]\n        return {"notes": notes}',
                )
            ],
        ),
    ],
)
