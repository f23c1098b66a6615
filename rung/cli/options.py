"""Options, a kind of command and the way to print JSON that several verbs share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from rung.lab import runs_folder
from rung.runs.files import to_json
from rung.text import echo_json


class GroupWithDefault(click.Group):
    """`rung data piano`: a word that is no verb of the group is the first argument of its default command."""

    default: click.Command

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = super().get_command(ctx, name)
        if found is not None:
            return found
        assert self.default.callback is not None
        callback = functools.partial(self.default.callback, name)
        return click.Command(name, params=list(self.default.params), help=self.default.help, callback=callback)


runs_option = click.option(
    "--runs", "root", envvar="RUNG_RUNS", default=runs_folder, show_envvar=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the runs; default: runs, here or in a folder above.",
)  # fmt: skip


def _trust(context: click.Context, parameter: click.Parameter, is_on: bool) -> None:
    if is_on:
        from rung.runs.trust import trusting

        context.with_resource(trusting())


trust_option = click.option(
    "--trust", is_flag=True, expose_value=False, callback=_trust,
    help="Also execute code that came with the run: a recipe below the runs folder, or in what was pulled.",
)  # fmt: skip
token_option = click.option(
    "--token", envvar="RUNG_TOKEN", show_envvar=True, metavar="TEXT",
    help="Let in only who gives it; at least 16 characters.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
config_option = click.option(
    "-c", "--config", "files", multiple=True, type=click.Path(path_type=Path), help="A YAML file of keys."
)
mirror_option = click.option(
    "--mirror", "mirrors", multiple=True, type=click.Choice(["wandb", "tensorboard"]),
    help="Also write it for this tracker, offline; may be repeated.",
)  # fmt: skip
nproc_option = click.option(
    "--nproc", type=click.IntRange(1), default=1, metavar="N", help="Train in N processes, each on a GPU of its own."
)
remote_option = click.option(
    "--remote", metavar="URL", help="Also send the run to object storage, after each save and at the end."
)


def print_json(value: Any) -> None:
    echo_json(to_json(value))
