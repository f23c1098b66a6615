"""The mistakes of a user, as opposed to ours.

A UserError carries one sentence (what happened, the value, the limit, the remedy) and a code, a short slug that stays
when the sentence is improved. The command line prints both and exits with 2, without a traceback. Everything else
that is raised is a bug of rung and keeps its traceback.
"""


class UserError(Exception):
    """A mistake the user can fix; the message says how."""

    code = "user"  # for recipes outside of rung, which may raise it without a code

    def __init__(self, message: str, *, code: str | None = None):
        super().__init__(message)
        if code is not None:
            self.code = code


class ConfigError(UserError):
    """A key or a value of the configuration that cannot be used."""

    code = "config"


class DataError(UserError):
    """Data that is missing, damaged or unfit for what was asked."""

    code = "data"


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model."""

    code = "checkpoint"


class RunError(UserError):
    """A run that does not exist, cannot be read or is in the wrong state."""

    code = "run"


class RecipeError(UserError):
    """A recipe that breaks its contract with the engine."""

    code = "recipe"
