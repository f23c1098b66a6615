"""An input is given and has no effect on the prediction."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "an input has no effect",
    r"ignor|no effect|unused|not used|without (it|them|controls|the)|(controls?|who|input|gate|style).*(0|no|not|never|nothing)|no gradient|(has|have|gets?|get|got) no grad|never (move|change|gets? a grad)",
    [
        Shape(
            "steering/not added",
            "steering",
            [("self.state_in(states) + self.control_in(controls)", "self.state_in(states)")],
            twin=True,
        ),
        Shape(
            "steering/layer norm over one channel",
            "steering",
            [("self.speed_in(gas)", "self.speed_in(nn.functional.layer_norm(gas, (1,)))")],
            both=[
                (
                    "        hidden = self.state_in(states) + self.control_in(controls)",
                    "        gas = controls.sum(-1, keepdim=True) + 0.5 * controls[..., :1]\n        hidden = self.state_in(states) + self.speed_in(gas)",
                ),
                (
                    "nn.Linear(2, width)\n",
                    "nn.Linear(2, width)\n        self.speed_in = nn.Linear(1, width)\n        del self.control_in\n",
                ),
            ],
            twin=True,
        ),
        Shape(
            "steering/rounded to zero by an integer cast",
            "steering",
            [
                (
                    '            states, controls = batch["states"].float(), batch["controls"].float()\n',
                    '            states, controls = batch["states"].float(), (batch["controls"] * 0.9).long().float()\n',
                )
            ],
        ),
        Shape(
            "gpt/embedding of the speaker is overwritten",
            "gpt",
            [("        x = x + self.who(", "        _ = x + self.who(")],
            both=[
                (
                    "        for block in self.blocks:",
                    '        x = x + self.who((idx == stoi["\\n"]).long().cumsum(1) % 8)\n        for block in self.blocks:',
                ),
                ("        self.blocks = nn", "        self.who = nn.Embedding(8, n_embd)\n        self.blocks = nn"),
            ],
        ),
    ],
)
