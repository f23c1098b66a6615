"""Config keys, values, metrics and events that have another name, or none, since a run was recorded: the only place
that knows the old names.

A run's folder is never rewritten: its config and its sources are read as if they had been written today, and the doctor
reads its rows and events so.
"""

from __future__ import annotations

from typing import Any

# Old dotted key -> what it is called now; None where a key went away because it had one legal value or no effect.
KEYS: dict[str, str | None] = {
    "signals.look_every": "signals.activation_stats_every",
}
# The same for the keys of one recipe, as run.json names it: other recipes may still have a key of that name.
KEYS_OF_RECIPE: dict[str, dict[str, str | None]] = {
    "text": {"stage": None, "loss_masking": None},
}
KEYS_OF_RECIPE["rung.recipes.text.recipe:Text"] = KEYS_OF_RECIPE["text"]  # a run started with the class itself
# Values of a recipe's keys that are spelled otherwise today.
VALUES_OF_RECIPE: dict[str, dict[str, dict[Any, Any]]] = {
    "world": {"model.warp": {True: "last", False: "none"}},
}
VALUES_OF_RECIPE["rung.recipes.world.recipe:World"] = VALUES_OF_RECIPE["world"]
METRICS = {"look/": "logits/"}  # by prefix
EVENTS = {"no_looks": "no_activation_stats"}  # by kind


def current_metric(name: str) -> str:
    """What a recorded metric is called today."""
    for old, new in METRICS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def current_config(tree: dict[str, Any], recipe: object) -> dict[str, Any]:
    """The tree of a recorded config under today's names; in place. `recipe` is what run.json says."""
    for old, new in (KEYS | KEYS_OF_RECIPE.get(str(recipe), {})).items():
        *branches, leaf = old.split(".")
        node: Any = tree
        for branch in branches:
            node = node.get(branch) if isinstance(node, dict) else None
        if not isinstance(node, dict) or leaf not in node:
            continue
        value = node.pop(leaf)
        if new is not None:
            *branches, leaf = new.split(".")
            node = tree
            for branch in branches:
                node = node.setdefault(branch, {})
            node.setdefault(leaf, value)
    for key, current in VALUES_OF_RECIPE.get(str(recipe), {}).items():
        *branches, leaf = key.split(".")
        node = tree
        for branch in branches:
            node = node.get(branch) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(leaf), bool | str):
            node[leaf] = current.get(node[leaf], node[leaf])
    return tree


def current_sources(sources: dict[str, str], recipe: object) -> dict[str, str]:
    """Dotted keys of a recorded config -> who set them, under today's names."""
    renamed = KEYS | KEYS_OF_RECIPE.get(str(recipe), {})
    named = ((renamed.get(key, key), source) for key, source in sources.items())
    return {key: source for key, source in named if key is not None}
