"""If this fails, a run that was recorded under older names of keys no longer opens, resumes or replays."""

from __future__ import annotations

from rung.runs.renamed import current_config, current_sources


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
