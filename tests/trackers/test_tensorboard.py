"""If this fails, TensorBoard shows other numbers than the record has, or its files are read wrongly.

Both directions are held against TensorBoard's own code: its reader for what we write, its writers for what we read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.runs.query import open_run
from rung.runs.record import Record
from rung.trackers.history import History
from rung.trackers.mirror import open_mirror
from rung.trackers.tensorboard import TensorboardSink, crc32c, find, frame, masked, read, records

NAMES = st.text(st.characters(codec="utf-8"), max_size=20)


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def only(path: Path, problems: list[str] | None = None) -> History:
    histories = list(read(path, [] if problems is None else problems))
    assert len(histories) == 1
    return histories[0]


def test_checksums_are_those_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    for data in (b"", b"a", bytes(range(256))):
        assert masked(data) == masked_crc32c(data)


def test_tensorboard_reads_what_a_run_mirrors(start: Callable[..., Record]) -> None:
    record = start(why="does *this* stay <b>text</b>?\n# yes")
    run = open_run(record.path, record.path)
    mirror = open_mirror("tensorboard", record.path, run.document, run.config())
    record.follow(mirror)
    for step in range(20):
        record.log(step, {"loss": 2.0 / (step + 1), "eval/val/loss": math.nan, "norm": math.inf, "ü\n<x>": -math.inf})
    record.event("note", step=3, text="a note")
    record.finish("finished")
    assert mirror.problem is None

    folder = record.path / "mirror" / "tensorboard"
    found = accumulated(folder)
    assert set(found.Tags()["scalars"]) == {"loss", "eval/val/loss", "norm", "ü\n<x>"}
    losses = found.Scalars("loss")
    assert [event.step for event in losses] == list(range(20))
    assert [event.value for event in losses] == [_float32(2.0 / (step + 1)) for step in range(20)]
    written = run.metrics(["unix_s"])["unix_s"]
    assert all(abs(event.wall_time - unix_s) < 60 for event, unix_s in zip(losses, written))
    assert all(math.isnan(event.value) for event in found.Scalars("eval/val/loss"))
    assert {event.value for event in found.Scalars("norm")} == {math.inf}
    assert {event.value for event in found.Scalars("ü\n<x>")} == {-math.inf}
    texts = [found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in ("why", "notes")]
    assert texts == ["    does *this* stay <b>text</b>?\n    # yes", "    a note"]


def test_markdown_and_html_are_shown_as_text(tmp_path: Path) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    sink = TensorboardSink(tmp_path, {"id": "a/1", "why": "*not bold* <b>nor this</b>"}, {})
    sink.open()
    sink.close("finished")
    shown = markdown_to_safe_html(accumulated(tmp_path / "tensorboard").Tensors("why")[0].tensor_proto.string_val[0])
    assert "*not bold* &lt;b&gt;nor this&lt;/b&gt;" in shown
    assert "<em>" not in shown


def test_hparams_are_understood_by_the_plugin(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    config = {"lr": {"rate": 0.5}, "name": "x", "is_on": True, "none": None, "sizes": [1, 2], "n": 3}
    sink = TensorboardSink(tmp_path, {"id": "a/1"}, config)
    sink.open()
    sink.row(0, 1.0, {"loss": 1.0})
    sink.close("crashed")
    plugin = accumulated(tmp_path / "tensorboard").PluginTagToContent("hparams")
    begun = metadata.parse_session_start_info_plugin_data(plugin[metadata.SESSION_START_INFO_TAG])
    given = {key: getattr(value, str(value.WhichOneof("kind"))) for key, value in begun.hparams.items()}
    assert given == {"lr.rate": 0.5, "name": "x", "is_on": True, "none": "", "sizes": "[1, 2]", "n": 3.0}
    assert metadata.parse_session_end_info_plugin_data(plugin[metadata.SESSION_END_INFO_TAG]).status == 2
    history = only(tmp_path)
    assert history.config["lr"] == {"rate": 0.5}
    assert (history.config["n"], history.config["is_on"], history.status) == (3, True, "crashed")


def test_what_a_resume_does_again_replaces_in_tensorboard_too(start: Callable[..., Record]) -> None:
    record = start()
    run = open_run(record.path, record.path)
    for steps, sign in ((range(10), 1), (range(6, 9), -1)):
        attempt = record if sign == 1 else Record.reopen(record.path, command=[])
        attempt.follow(open_mirror("tensorboard", record.path, run.document, run.config()))
        for step in steps:
            attempt.log(step, {"loss": float(sign * step)})
        attempt.finish("stopped")
    expected = [0, 1, 2, 3, 4, 5, -6, -7, -8]
    found = accumulated(record.path / "mirror" / "tensorboard").Scalars("loss")
    assert [event.value for event in found] == expected
    history = only(record.path / "mirror")
    assert [row["loss"] for _, _, row in history.rows()] == expected
    assert history.num_replaced == 3  # 7, 8 and 9 were taken back, 6 was overwritten


@given(st.lists(st.dictionaries(NAMES, st.floats(width=32), min_size=1, max_size=4), min_size=1, max_size=5))
def test_any_names_and_numbers_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    sink = TensorboardSink(folder, {"id": "a/1"}, {})
    sink.open()
    for step, row in enumerate(rows):
        sink.row(step, 1.5, row)
    sink.close("finished")
    back = [row for _, _, row in only(folder).rows()]
    assert [{name: struct.pack("<d", value) for name, value in row.items() if value == value} for row in back] == [
        {name: struct.pack("<d", value) for name, value in row.items() if value == value} for row in rows
    ]
    assert [sorted(row) for row in back] == [sorted(row) for row in rows]


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    import numpy as np
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "logs" / "run1")) as writer:
        for step in range(5):
            writer.add_scalar("Loss/train", step / 3, step, walltime=1000.0 + step)
            writer.add_scalar("Loss/val", math.nan, step)
        writer.add_scalar("new style", 2.5, 4, new_style=True)
        writer.add_scalar("double", 1 / 3, 4, new_style=True, double_precision=True)
        writer.add_text("args", "--lr 1")
        writer.add_histogram("weights", np.arange(3))
        writer.add_image("picture", np.zeros((3, 2, 2), "uint8"))
    history = only(tmp_path / "logs")
    rows = {step: (unix_s, row) for step, unix_s, row in history.rows()}
    assert [rows[step][1]["Loss/train"] for step in range(5)] == [_float32(step / 3) for step in range(5)]
    assert math.isnan(rows[2][1]["Loss/val"])
    assert (rows[4][1]["new style"], rows[4][1]["double"]) == (2.5, 1 / 3)
    assert (history.name, history.group) == ("run1", "logs")
    assert history.left_out == {"text": 1, "histogram": 1, "image": 1}
    assert history.started == 1000.0


def test_every_number_type_of_the_new_form_is_read(tmp_path: Path) -> None:
    import numpy as np
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    writer = EventFileWriter(str(tmp_path))
    kinds = ["float16", "float32", "float64", "int32", "int64", "bool"]
    for step, value in enumerate([1, 0]):
        values = [
            Summary.Value(tag=kind, tensor=make_tensor_proto(np.array(value, kind)), metadata=None if step else plugin)
            for kind in kinds
        ]
        writer.add_event(Event(step=step, wall_time=5.0, summary=Summary(value=values)))
    several = Summary.Value(tag="several", tensor=make_tensor_proto(np.ones(3, "float32")), metadata=plugin)
    writer.add_event(Event(step=2, wall_time=5.0, summary=Summary(value=[several])))
    writer.close()
    history = only(tmp_path)
    assert [row for _, _, row in history.rows()] == [dict.fromkeys(kinds, 1), dict.fromkeys(kinds, 0)]
    assert history.left_out == {"tensor": 1}


def test_folders_named_train_and_validation_are_one_run(tmp_path: Path) -> None:
    for part in ("train", "validation"):
        sink = TensorboardSink(tmp_path / "fit" / part, {"id": "a"}, {})
        sink._folder = tmp_path / "fit" / part
        sink.open()
        sink.row(1, 1.0, {"epoch_loss": 0.5, f"{part}/x": 1.0})
        sink.close("finished")
    other = TensorboardSink(tmp_path / "other", {"id": "b"}, {})
    other.open()
    other.row(0, 1.0, {"loss": 1.0})
    other.close("finished")
    runs = {history.name: history for history in read(tmp_path, [])}
    assert set(runs) == {"fit", "other/tensorboard"}
    assert runs["fit"].names == ["train/epoch_loss", "train/x", "validation/epoch_loss", "validation/x"]


def test_a_torn_end_is_survived_at_every_byte(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path, {"id": "a/1"}, {})
    sink.open()
    for step in range(3):
        sink.row(step, 1.0, {"loss": float(step)})
    sink.flush()
    file = next((tmp_path / "tensorboard").iterdir())
    whole = file.read_bytes()
    num_records = len(list(records(file)))
    torn = tmp_path / "torn.tfevents"
    for length in range(len(whole)):
        torn.write_bytes(whole[:length])
        assert len(list(records(torn))) < num_records
        problems: list[str] = []
        list(read(torn, problems))
        assert problems == []


def test_a_wrong_checksum_is_told_and_what_came_before_is_kept(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path, {"id": "a/1"}, {})
    sink.open()
    for step in range(5):
        sink.row(step, 1.0, {"loss": float(step)})
    sink.flush()
    file = next((tmp_path / "tensorboard").iterdir())
    data = bytearray(file.read_bytes())
    data[-30] ^= 1
    file.write_bytes(data)
    history = only(tmp_path)
    assert [step for step, _, _ in history.rows()] == [0, 1, 2, 3]
    assert "wrong checksum" in history.problems[0]


def test_what_is_no_event_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.tfevents.1").write_bytes(b"this is a text and no event file, and long enough")
    problems: list[str] = []
    assert list(read(tmp_path, problems)) == []
    assert "is not an event file of TensorBoard" in problems[0]
    (tmp_path / "y.tfevents.1").write_bytes(frame(b"\xff\xff\xff"))
    assert "cannot be decoded" in only(tmp_path / "y.tfevents.1").problems[0]
    assert find(tmp_path / "nothing") == {}


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
