"""What a script logs beside numbers: pictures, sound, tables, histograms, under the names that wandb gives them.

    wandb.log({"digits": [wandb.Image(picture, caption="a seven")], "weights": wandb.Histogram(values)})

Each becomes a sample of its step: .png, .wav, .table.json, .histogram.json. What a thing is is told by what it can do,
so that neither torch nor PIL is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rung.errors import UserError
from rung.runs.files import plain, to_json

_MOST_CELLS = 200_000  # of a table
_MOST_BINS = 512


class Media:
    """Something to keep as a sample."""

    caption = ""
    rate: int | None = None

    def content(self, name: str) -> tuple[str, Any]:
        """The name of the sample, and what it is, as `run.sample` takes them."""
        raise NotImplementedError


class Image(Media):
    """A picture: of PIL, a figure, a path, or numbers (height, width), with 1, 3 or 4 colours last, or first in a
    tensor; whole numbers up to 255, or fractions up to 1."""

    def __init__(self, data_or_path: Any, *words: Any, caption: str | None = None, **unknown: Any) -> None:
        self._data, self.caption = data_or_path, str(caption or "")

    def content(self, name: str) -> tuple[str, Any]:
        data = self._data
        if isinstance(data, str | Path):
            path = Path(data)
            return f"{name}{path.suffix}", path.read_bytes()
        if callable(getattr(data, "save", None)) or callable(getattr(data, "savefig", None)):
            return name, data
        import numpy as np
        from PIL import Image as pictures

        is_tensor = hasattr(data, "detach")
        values = np.asarray(data.detach().float().cpu().numpy() if is_tensor else data)
        if is_tensor and values.ndim == 3 and values.shape[0] in (1, 3, 4):
            values = values.transpose(1, 2, 0)
        if values.ndim == 3 and values.shape[2] == 1:
            values = values[:, :, 0]
        if not values.size or values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)):
            raise UserError(f"numbers of shape {np.shape(data)} are no picture", code="bad-sample")
        if values.dtype != np.uint8:
            values = np.nan_to_num(values.astype(np.float64))
            scale = 255.0 if values.max() <= 1.0 else 1.0
            values = np.clip(np.round(scale * values), 0, 255).astype(np.uint8)
        return name, pictures.fromarray(np.ascontiguousarray(values))


class Audio(Media):
    """Sound: a path, or numbers between -1 and 1 with their rate."""

    def __init__(self, data_or_path: Any, sample_rate: int | None = None, caption: str | None = None) -> None:
        self._data, self.caption = data_or_path, str(caption or "")
        self.rate = None if isinstance(data_or_path, str | Path) else sample_rate

    def content(self, name: str) -> tuple[str, Any]:
        if isinstance(self._data, str | Path):
            path = Path(self._data)
            return f"{name}{path.suffix}", path.read_bytes()
        if self.rate is None:
            raise UserError("sound needs sample_rate=", code="bad-sample")
        return name, self._data


class Table(Media):
    """Rows under named columns; cells are numbers and texts, whatever else is kept as text."""

    def __init__(
        self,
        columns: Sequence[Any] | None = None,
        data: Any = None,
        rows: Any = None,
        dataframe: Any = None,
        **unknown: Any,
    ) -> None:
        if dataframe is None and hasattr(data, "itertuples"):
            dataframe, data = data, None
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.itertuples(index=False)
        self.data: list[list[Any]] = [list(row) for row in (rows if data is None else data) or ()]
        width = len(self.data[0]) if self.data else 3
        self.columns = [str(name) for name in (range(width) if columns is None else columns)]

    def add_data(self, *cells: Any) -> None:
        self.data.append(list(cells))

    def add_column(self, name: Any, data: Any) -> None:
        self.data = [[*row, cell] for row, cell in zip(self.data or [[] for _ in data], data, strict=True)]
        self.columns.append(str(name))

    def content(self, name: str) -> tuple[str, Any]:
        most = max(_MOST_CELLS // max(len(self.columns), 1), 1)
        rows = [[_cell(cell) for cell in row] for row in self.data[:most]]
        return f"{name}.table.json", to_json({"columns": self.columns, "rows": rows, "num_rows": len(self.data)})


class Histogram(Media):
    """How often values fall between edges: out of the values, or as numpy.histogram returns it."""

    def __init__(
        self, sequence: Any = None, np_histogram: tuple[Any, Any] | None = None, num_bins: int = 64, **unknown: Any
    ) -> None:
        self._sequence, self._found, self._num_bins = sequence, np_histogram, max(1, min(int(num_bins), _MOST_BINS))

    def content(self, name: str) -> tuple[str, Any]:
        import numpy as np

        if self._found is not None:
            counts, edges = (np.asarray(part) for part in self._found)
        else:
            data = self._sequence
            values = np.asarray(data.detach().float().cpu().numpy() if hasattr(data, "detach") else data, np.float64)
            counts, edges = np.histogram(values[np.isfinite(values)], self._num_bins)
        return f"{name}.histogram.json", to_json({"edges": edges.tolist(), "counts": counts.tolist()})


def _cell(value: Any) -> Any:
    if isinstance(value, Media):
        return f"({type(value).__name__.lower()})"
    if hasattr(value, "is_cpu") and value.numel() == 1:
        value = value.item()
    found = plain(value)
    return found if found is None or isinstance(found, bool | int | float | str) else str(found)


def parts(name: str, value: Any) -> Iterator[tuple[str, Media]]:
    """The name of the sample of each thing that was logged under a name."""
    name = name.replace("/", "_")
    if isinstance(value, Media):
        yield name, value
    else:
        for number, one in enumerate(value):
            yield f"{name}_{number}", one


def is_media(value: Any) -> bool:
    """Whether it is such a thing, or several."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return all(isinstance(one, Media) for one in value) if is_list else isinstance(value, Media)
