"""The catalog: one line per recipe, and how to find any other one.

A recipe outside this package is named as `package.module:Class` on the command line; its presets are the YAML files in
a folder `presets` beside its module. Imports no torch.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from rung.config import Layer, load_file
from rung.errors import ConfigError, UserError
from rung.recipe import Recipe

CATALOG = {
    "music": ("rung.recipes.music.recipe:Music", "Music from text, over the codes of an audio codec."),
    "piano": ("rung.recipes.piano.recipe:Piano", "A GPT on piano notes: MIDI in, MIDI and sound out."),
    "speech": ("rung.recipes.speech.recipe:Speech", "Ears for a language model: sound and a question in, text out."),
    "text": ("rung.recipes.text.recipe:Text", "A language model on text by category, for scaling studies."),
    "world": ("rung.recipes.world.recipe:World", "A place learned from video and controls, to walk in."),
}
DEFAULT_PRESET = "tiny"


def find_recipe(name: str) -> type[Recipe]:
    """The class of a recipe of the catalog, or of any `package.module:Class`."""
    target = CATALOG[name][0] if name in CATALOG else name
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or module_name.startswith("."):
        problem = f"{name} is not a recipe{_nearest(name, CATALOG)}"
        raise UserError(f"{problem} (`rung recipes` lists them; your own is package.module:Class)", code="no-recipe")
    here = str(Path.cwd())
    # A user's recipe lies where the user is, as with `python -m`. Where it does not, that folder is left out: it may be
    # anybody's, and what is imported later would be looked for there first.
    if name not in CATALOG and here not in sys.path and PathFinder.find_spec(module_name.partition(".")[0], [here]):
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise UserError(f"{name} needs {error.name}, which is not installed", code="not-installed") from error
        problem = f"no module {module_name} for recipe {name}"
        raise UserError(f"{problem}; looked from {Path.cwd()}", code="no-recipe") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Recipe) and hasattr(found, "Config")):
        problem = f"{module_name} has no class {class_name} that is a rung.recipe.Recipe with a Config"
        raise UserError(problem, code="no-recipe")
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def short_name(name: str) -> str:
    """What runs of a recipe are filed under unless the user says otherwise."""
    return name if name in CATALOG else name.rpartition(":")[2].lower()


def presets(recipe_class: type[Recipe]) -> dict[str, Path]:
    file = getattr(sys.modules.get(recipe_class.__module__), "__file__", None)  # a notebook has none
    folder = Path(file).parent / "presets" if file else Path("presets")
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def preset_layer(recipe_class: type[Recipe], name: str | None) -> list[Layer]:
    """The layer of a preset; without a name the recipe's `tiny`, if it has one."""
    known = presets(recipe_class)
    if name is None and DEFAULT_PRESET not in known:
        return []
    name = name or DEFAULT_PRESET
    if name not in known:
        problem = f"preset={name} is not a preset{_nearest(name, known)}"
        raise ConfigError(f"{problem} (there are: {', '.join(known) or 'none'})", code="no-preset")
    return [Layer(f"preset {name}", load_file(known[name]))]
