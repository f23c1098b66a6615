"""The process ends before its training does."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "the process was killed, or left early",
    r"kill|vanish|died|no sign of life|out of memory|ended|stopped|exit|interrupt|unfinished|not finish|before|SIGTERM|SIGKILL|last heartbeat",
    [
        Shape(
            "gpt/SIGKILL, as the memory killer does",
            "gpt",
            [
                (
                    "    for _ in range(accumulation):\n",
                    "    if it == 170:\n        os.kill(os.getpid(), signal.SIGKILL)\n    for _ in range(accumulation):\n",
                )
            ],
            both=[("import math\n", "import math\nimport os\nimport signal\n")],
            twin=True,
        ),
        Shape(
            "mlp/SIGTERM of a queue, guarded",
            "mlp",
            [
                (
                    "    loss = loss_fn(batch)\n",
                    "    if step == 220:\n        os.kill(os.getpid(), signal.SIGTERM)\n    loss = loss_fn(batch)\n",
                )
            ],
            both=[("import torch\nfrom", "import os\nimport signal\n\nimport torch\nfrom")],
        ),
        Shape(
            "padded/os._exit in a worker's handler",
            "padded",
            [
                (
                    "    ids = torch.randint(len(train_x)",
                    "    if step == 140:\n        os._exit(3)\n    ids = torch.randint(len(train_x)",
                )
            ],
            both=[("import torch\nfrom torch import nn", "import os\n\nimport torch\nfrom torch import nn")],
            twin=True,
        ),
        Shape(
            "cnn/sys.exit(1) in the third epoch",
            "cnn",
            [("    model.train()\n", "    if epoch == 3:\n        sys.exit(1)\n    model.train()\n")],
            both=[
                (
                    "import torch\nfrom torch import nn\nfrom torch.nn",
                    "import sys\n\nimport torch\nfrom torch import nn\nfrom torch.nn",
                )
            ],
        ),
    ],
)
