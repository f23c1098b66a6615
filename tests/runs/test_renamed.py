"""If this fails, a run that was recorded under older names of keys no longer opens, resumes or replays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rung.doctor import history
from rung.runs.query import open_run
from rung.runs.record import Record
from rung.runs.renamed import current_config, current_metric, current_sources


def test_an_old_config_is_read_under_todays_names() -> None:
    tree = current_config({"signals": {"look_every": 20, "probes": True}, "seed": 1}, "piano")
    assert tree == {"signals": {"activation_stats_every": 20, "probes": True}, "seed": 1}
    assert current_sources({"signals.look_every": "command line"}, "piano") == {
        "signals.activation_stats_every": "command line"
    }


def test_a_config_of_today_stays_as_it_is() -> None:
    tree = {"signals": {"activation_stats_every": 5}, "model": {"n_layer": 2}}
    assert current_config(dict(tree), "text") == tree
    assert current_sources({"model.n_layer": "preset tiny"}, "text") == {"model.n_layer": "preset tiny"}


def test_a_key_that_went_away_is_left_out_for_its_recipe_alone() -> None:
    old = {"stage": "pretraining", "loss_masking": "pretraining", "seed": 1}
    assert current_config(dict(old), "text") == {"seed": 1}
    assert current_config(dict(old), "piano") == old


def test_an_old_value_is_read_as_todays_and_for_its_recipe_alone() -> None:
    for recipe in ("world", "rung.recipes.world.recipe:World"):
        for old, new in ((True, "last"), (False, "none"), ("keyframe", "keyframe")):
            assert current_config({"model": {"warp": old}}, recipe) == {"model": {"warp": new}}
    assert current_config({"model": {"warp": True}}, "piano") == {"model": {"warp": True}}
    assert current_config({"model": {}}, "world") == {"model": {}}


def test_the_doctor_reads_old_metrics_and_events_under_todays_names(
    start: Callable[..., Record], tmp_path: Path
) -> None:
    """Also of a run that was resumed after the names had changed: one series, in the order of its steps."""
    record = start("old", root=tmp_path)
    record.log(0, {"loss": 5.0, "look/entropy": 3.0})
    record.event("no_looks", step=0, why="it was so")
    record.log(1, {"loss": 4.0, "logits/entropy": 2.0})
    record.finish("finished")
    found = history.read(open_run("old", tmp_path))
    assert [found["logits/entropy"].steps.tolist(), found["logits/entropy"].values.tolist()] == [[0, 1], [3.0, 2.0]]
    assert "look/entropy" not in found
    assert [event["why"] for event in found.events_of("no_activation_stats")] == ["it was so"]
    assert current_metric("outlook/x") == "outlook/x"
