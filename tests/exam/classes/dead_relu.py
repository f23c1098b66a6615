"""Units of a rectifier are zero for every input and never come back."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "rectified units are dead",
    r"dead|dying|never (fire|active)|zero (activation|output)|activations?.*(0|zero)|(no|zero) gradient|saturat|not (move|moving)|never (move|change)|constant",
    [
        Shape(
            "mlp/bias far below 0",
            "mlp",
            [
                (
                    "model = nn.Sequential(*layers())\n",
                    "model = nn.Sequential(*layers())\nnn.init.constant_(model[0].bias, -20.0)\n",
                )
            ],
            twin=True,
        ),
        Shape(
            "cnn/rectified logits of a shifted head",
            "cnn",
            [
                (
                    "return self.head(self.drop(F.max_pool2d(self.body(self.stem(x)), 2).flatten(1)))",
                    "return self.head(self.drop(F.max_pool2d(F.relu(self.body(self.stem(x)) - 30), 2).flatten(1)))",
                )
            ],
            both=[('run.data("train", train_x)\n', 'run.watch(model, optimizer)\nrun.data("train", train_x)\n')],
            twin=True,
        ),
        Shape(
            "steering/first layer of the exit",
            "steering",
            [
                (
                    "    def forward(self, states, controls):",
                    "        nn.init.constant_(self.out[1].bias, -50.0)\n\n    def forward(self, states, controls):",
                )
            ],
        ),
        Shape(
            "gru/rectified exit of a forecaster, far below 0",
            "gru",
            [("return self.leave(self.drop(hidden))", "return torch.relu(self.leave(self.drop(hidden)) - 4)")],
            both=[("dict(seed=1337, lr=5e-3", "dict(seed=1337, lr=6e-3")],
        ),
    ],
)
