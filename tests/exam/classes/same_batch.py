"""Steps see the same rows again and again, or rows in an order that means something."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "steps do not see new rows",
    r"same (batch|rows|data|loss)|shuffl|order|repeat|again and again|sorted|few rows|period|one batch|epoch",
    [
        Shape(
            "gpt/seed set in get_batch",
            "gpt",
            [("    part = train_data if", "    torch.manual_seed(seed)\n    part = train_data if")],
            twin=True,
        ),
        Shape(
            "cnn/first batch of the loader only",
            "cnn",
            [("    for x, y in loader:", "    for x, y in [next(iter(fixed))] * len(loader):")],
            both=[
                (
                    "criterion = nn.Cross",
                    'fixed = DataLoader(TensorDataset(train_x, train_y), batch_size=config["batch_size"])\ncriterion = nn.Cross',
                )
            ],
        ),
        Shape(
            "cnn/sorted by class and not shuffled",
            "cnn",
            [
                (
                    'loader = DataLoader(TensorDataset(train_x, train_y), batch_size=config["batch_size"], shuffle=True)',
                    'by_class = train_y.argsort()\nloader = DataLoader(TensorDataset(train_x[by_class], train_y[by_class]), batch_size=config["batch_size"])',
                )
            ],
            twin=True,
        ),
        Shape(
            "bytes/gather ignores its ids",
            "bytes_gru",
            [
                (
                    "self.data[ids[:, None] * self.context + np.arange(self.context + 1)]}",
                    "self.data[np.arange(len(ids))[:, None] * self.context + np.arange(self.context + 1)]}",
                )
            ],
        ),
    ],
)
