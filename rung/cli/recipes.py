"""rung recipes"""

from __future__ import annotations

import json

import click

from rung.cli.options import json_option
from rung.recipes import CATALOG, find_recipe, presets
from rung.report.table import print_table
from rung.text import echo_json


@click.command(short_help="List the recipes.")
@json_option
def command(as_json: bool) -> None:
    """List the recipes that come with rung, and their presets.

    A recipe of your own is named as package.module:Class wherever a recipe is asked for.

    \b
    Examples:
      rung recipes
      rung train mypackage.recipes:Birdsong data.batch_size=8
    """
    rows = {name: {"about": about, "presets": list(presets(find_recipe(name)))} for name, (_, about) in CATALOG.items()}
    if as_json:
        echo_json(json.dumps(rows, indent=1))
        return
    table = [[name, str(row["about"]), ", ".join(row["presets"])] for name, row in rows.items()]
    print_table(["recipe", "learns", "presets"], table, keep=(0, 1, 2))
