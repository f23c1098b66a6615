"""The command line. Each verb is one file with a `command`, imported only when it is asked for.

So `rung --help` imports neither torch nor numpy, and a reading verb works on a machine without torch.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from pathlib import Path
from types import TracebackType

import click

from rung import __version__
from rung.errors import UserError
from rung.secrets import without_passwords
from rung.text import echo, error_text, write

GROUPS = {
    "Train": {
        "recipes": "List the recipes and their presets.",
        "config": "Print the keys of a recipe with their values, sources and meaning.",
        "data": "Prepare, describe or verify a data set.",
        "check": "Look for mistakes before training: data, loss, schedule, memory.",
        "train": "Train a recipe; every run is recorded.",
        "resume": "Resume a run that was stopped or killed.",
    },
    "Read": {
        "ls": "List runs: filter, sort, group over seeds, or as a tree.",
        "show": "Show one run: what it was, what happened, what to look at.",
        "watch": "Follow a run that trains elsewhere.",
        "serve": "Show the whole lab book as a live page.",
        "report": "Write the page of a run, or of an experiment.",
        "metrics": "Write a run's metrics as CSV, JSON or Parquet.",
        "sql": "Ask all runs a question in SQL.",
    },
    "Use what was learned": {
        "sample": "Make samples from a run.",
        "play": "Try a model in the browser, or call it from a program.",
        "eval": "Evaluate a run on its eval sets.",
        "export": "Write a run's model for other programs.",
    },
    "Compare": {
        "diff": "Say what differs between two runs, and whether that was one change.",
        "ab": "Try one change with paired seeds, or judge runs that exist.",
        "sweep": "Train every point of a grid, a list or a search.",
    },
    "When something is wrong": {
        "doctor": "Say why a run is sick, with evidence and what to try.",
        "replay": "Run one step again: find where a NaN came from.",
        "bench": "Measure this machine, and compare with earlier measurements.",
    },
    "Write in the book": {
        "note": "Write a dated note beside a run.",
        "verdict": "Say what became of a run's hypothesis.",
        "tag": "Put tags on runs, or take them off.",
        "pin": "Keep a checkpoint for good.",
    },
    "Keep and move": {
        "mv": "Rename an experiment, or move runs to another.",
        "rm": "Put runs into the trash, or take them out again.",
        "gc": "Empty the trash, and clear what no run needs.",
        "du": "Say how much disk each run takes.",
        "push": "Send data, runs and checkpoints to object storage.",
        "pull": "Download data, runs and checkpoints from object storage.",
        "import": "Import runs of wandb, TensorBoard or trackio.",
        "mirror": "Show a run in wandb or TensorBoard.",
    },
}
VERBS = {name: about for group in GROUPS.values() for name, about in group.items()}


_FILES = {"import": "import_"}  # a word that Python keeps for itself


class Verbs(click.Group):
    """A group whose commands are files, loaded by name; their one-line help lives here so that --help loads none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"rung.cli.{_FILES.get(name, name)}").command
        if "_RUNG_COMPLETE" in os.environ:
            from rung.cli.words import complete

            complete(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{args[0]} is not a verb{hint} (rung --help lists them)", code="no-verb")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, VERBS))
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), about) for name, about in verbs.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="rung")
def cli() -> None:
    """Trains generative sequence models and keeps the lab book while it does.

    \b
    Start here:
      rung data piano                   prepare the embedded data
      rung train piano                  train the tiny preset
      rung show piano                   what happened, and what to look at
    """


# What a disk says of one file or folder; a file that is not there, or there already, is a mistake of ours.
_OF_THE_DISK = {
    errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOSPC,
    errno.EDQUOT, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENXIO,
}  # fmt: skip


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_traceback
    if "_RUNG_COMPLETE" in os.environ:
        from rung.cli.words import use_our_shells

        use_our_shells()
    try:
        code = cli.main(prog_name="rung", standalone_mode=False)
    except SystemExit as error:
        if "_RUNG_COMPLETE" not in os.environ and error.code in (0, None) and (place := _place_outside_rung(error)):
            echo(f"rung: {place} called sys.exit({error.code or 0}) before the verb was done [exited]", err=True)
            sys.exit(2)
        raise
    except UserError as error:
        echo(f"rung: {without_passwords(str(error)) or error_text(error)} [{error.code}]", err=True)
        sys.exit(2)
    except MemoryError as error:
        echo(f"rung: out of memory: {error_text(error)} [out-of-memory]", err=True)
        sys.exit(2)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.NoSuchOption as error:
        from rung.cli.words import explain

        echo(f"rung: {explain(error, sys.argv[1:])} [usage]", err=True)
        sys.exit(2)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        help_verb = f" (see `{context.command_path} --help`)" if context is not None else ""
        said = without_passwords(" ".join(error.format_message().split()))
        echo(f"rung: {said}{help_verb} [usage]", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.filename is not None and error.errno in _OF_THE_DISK:
            echo(f"rung: cannot use {os.fsdecode(error.filename)}: {str(error.strerror).lower()} [os-error]", err=True)
            sys.exit(2)
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        echo(f"rung: cannot write the output: {error.strerror} [disk-full]", err=True)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def _place_outside_rung(error: BaseException) -> str | None:
    """Where the code of a recipe or of a library raised this; None where rung did."""
    import traceback

    # exit() is Python's own; after rung.init, sys.exit is wrapped in rung.script.current.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "_sitebuiltins" not in frame.filename and frame.name != "noted"
    ]
    if not frames or Path(frames[-1].filename).is_relative_to(Path(__file__).parent.parent):
        return None
    return f"{frames[-1].filename}, line {frames[-1].lineno},"


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A mistake of ours keeps its traceback; what it quotes must not steer the terminal."""
    import traceback

    write(sys.stderr, "".join(traceback.format_exception(kind, error, trace)))
