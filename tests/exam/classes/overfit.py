"""A model that is too large for its data learns it by heart."""

from tests.exam.programs import Class, Shape

CLASS = Class(
    "the model overfits",
    r"overfit|by heart|memori[sz]|rises? .*(while|and) .*train|generali[sz]|gap",
    [
        Shape(
            "gpt/two thousand characters",
            "gpt",
            [("train_data, val_data = data[:n], data[n:]", "train_data, val_data = data[:2000], data[n:]")],
            both=[("20, 300\n", "20, 400\n"), ("n_embd, dropout = 2, 2, 32", "n_embd, dropout = 2, 2, 64")],
            twin=True,
        ),
        Shape(
            "cnn/forty-eight images for many epochs",
            "cnn",
            [
                ("train_x, train_y = images(2000)", "train_x, train_y = images(48)"),
                ('"epochs": 5', '"epochs": 120'),
                ("0.1 * torch.randn_like(x)", "0.0 * x"),
                ('"lr": 0.05', '"lr": 0.2'),
                ('"dropout": 0.1', '"dropout": 0.0'),
            ],
        ),
        Shape(
            "mlp/forty rows, guarded, weight decay",
            "mlp",
            [
                ("x_train, y_train = make(4096)", "x_train, y_train = make(40)"),
                ("WIDTH, DEPTH = 1337, 3e-3, 400, 64, 32, 2", "WIDTH, DEPTH = 1337, 1e-2, 400, 20, 128, 3"),
            ],
            both=[
                ("Adam(model.parameters(), lr=LR)", "AdamW(model.parameters(), lr=LR, weight_decay=1e-3)"),
            ],
            twin=True,
        ),
        Shape(
            "melody/thirty tunes",
            "melody",
            [("tunes(2500, ", "tunes(30, ")],
            both=[('key(32, "Channels."', 'key(64, "Channels."')],
        ),
    ],
)
