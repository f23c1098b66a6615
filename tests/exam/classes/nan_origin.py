"""A NaN out of an operation at its edge: log of 0, a square root at 0, 0 / 0, a mask that allows nothing."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "a NaN is computed",
    r"\bnan\b|not finite|non-finite|infinit|\binf\b",
    [
        Shape(
            "mlp/square root of 0, guarded",
            "mlp",
            [(".add(1e-6).sqrt()", ".sqrt()")],
            both=[
                (
                    "(model(x)[:, 0] - y).pow(2).mean()",
                    "(error := model(x)[:, 0] - y).pow(2).mean() + 1e-3 * far(error).pow(2).sum().add(1e-6).sqrt()",
                ),
                ("\n\ndef loss_fn", "\n\ndef far(error):\n    return error * (error.abs() > 1.5)\n\n\ndef loss_fn"),
            ],
            twin=True,
        ),
        Shape(
            "gru/log of a probability of 0",
            "gru",
            [
                (
                    "scale_of_error(model(x), y)",
                    "torch.log((model(x) - y).square().mean().sub(0.02).clamp(min=0)).mul(0.1).add(1)",
                )
            ],
            both=[
                ("mse(model(x), y) / cfg", "scale_of_error(model(x), y) / cfg"),
                ("scheduler = torch", "scale_of_error = nn.MSELoss()\nscheduler = torch"),
            ],
        ),
        Shape(
            "padded/row without targets divides 0 by 0",
            "padded",
            [
                (
                    "    x, y = train_x[ids], train_y[ids]\n",
                    "    x, y = train_x[ids], train_y[ids].clone()\n    if step == 170:\n        y[:] = PAD\n",
                )
            ],
            says=r"\bnan\b|not finite|non-finite|infinit|no target|without targets",
            twin=True,
        ),
        Shape(
            "melody/a tune without allowed keys",
            "melody",
            [("allowed = (ids != PAD)", "allowed = (ids != PAD) & (ids != START) & (ids != 3 + NOTES - 1)")],
            both=[
                (
                    "    def forward(self, ids):\n        x =",
                    "    def forward(self, ids):\n        allowed = (ids != PAD)\n        x =",
                ),
                ("            x = block(x)\n", "            x = block(x, allowed)\n"),
                (
                    "    def forward(self, x):\n        q, k, v",
                    "    def forward(self, x, allowed):\n        mask = allowed[:, None, None, :] & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()\n        q, k, v",
                ),
                (
                    "scaled_dot_product_attention(q, k, v, is_causal=True)",
                    '(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf")).softmax(-1).matmul(v)',
                ),
                (
                    "nn\nfrom torch.nn.functional import cross_entropy, scaled_dot_product_attention",
                    "nn\nfrom torch.nn.functional import cross_entropy",
                ),
            ],
        ),
    ],
)
