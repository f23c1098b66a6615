"""Two runs whose code or settings differ in a place that is easy to forget."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import BASES, Class, Pair

MLP = (BASES / "mlp.py").read_text()
GPT = (BASES / "gpt.py").read_text()


def of(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} times: {old!r}")
        text = text.replace(old, new)
    return text


SETTINGS = of(
    MLP,
    ("import rung\n\n", "import rung\nfrom settings import BATCH\n\n"),
    ("STEPS, BATCH, WIDTH, DEPTH = 1337, 3e-3, 400, 64, 32, 2", "STEPS, WIDTH, DEPTH = 1337, 3e-3, 400, 32, 2"),
    ('"batch_size": BATCH, ', ""),
)
SHARED = of(
    MLP,
    (
        "import torch\nfrom torch import nn\n\nimport rung\n",
        "import sys\n\nimport torch\nfrom torch import nn\n\nimport rung\n\nsys.path.insert(0, '../shared')\nimport losses\n",
    ),
    ("(model(x)[:, 0] - y).pow(2).mean()", "losses.error(model(x)[:, 0], y)"),
)
YAML = of(
    MLP,
    ("import torch\nfrom", "import json\nfrom pathlib import Path\n\nimport torch\nfrom"),
    (
        "SEED, LR, STEPS, BATCH, WIDTH, DEPTH = 1337, 3e-3, 400, 64, 32, 2",
        "SEED, LR, STEPS, BATCH, WIDTH, DEPTH = json.loads(Path('local.json').read_text())",
    ),
    ('"batch_size": BATCH, "width": WIDTH, ', ""),
)
ENV = of(
    MLP,
    ("import torch\nfrom", "import os\n\nimport torch\nfrom"),
    ("optimizer = torch", "torch.use_deterministic_algorithms(True, warn_only=True)\noptimizer = torch"),
)
IGNORE = "runs/\n__pycache__/\nsettings.py\nlocal.json\n"

CLASS = Class(
    "the runs differ in code or settings outside of what was meant",
    r"settings|losses|local\.json|environ|CUBLAS|PYTHONHASHSEED",
    [
        Pair(
            "diff/ignored settings.py",
            {"train.py": SETTINGS, "settings.py": "BATCH = 64\n", ".gitignore": IGNORE},
            {"settings.py": "BATCH = 16\n"},
            git=True,
            twin=True,
            says=r"settings",
        ),
        Pair(
            "diff/import from a neighbouring folder",
            {"train.py": SHARED, "../shared/losses.py": "def error(found, y):\n    return (found - y).pow(2).mean()\n"},
            {"../shared/losses.py": "def error(found, y):\n    return (found - y).abs().mean()\n"},
            twin=True,
            says=r"losses",
        ),
        Pair(
            "diff/ignored local.json read by the script",
            {"train.py": YAML, "local.json": "[7, 3e-3, 300, 64, 32, 2]", ".gitignore": IGNORE},
            {"local.json": "[7, 3e-3, 300, 64, 96, 2]"},
            git=True,
            says=r"local\.json|initial weights|parameters",
        ),
        Pair(
            "diff/environment variables of the second run",
            {"train.py": ENV},
            {},
            env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "3"},
            first_env={"PYTHONHASHSEED": "0"},
            says=r"CUBLAS|PYTHONHASHSEED|environ",
        ),
    ],
)
