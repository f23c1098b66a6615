"""The mistakes of a user, as opposed to ours.

A UserError carries one sentence: what happened, the value, the limit, the remedy. The command line prints it and
exits with 2, without a traceback. Everything else that is raised is a bug of rung and keeps its traceback.
"""


class UserError(Exception):
    """A mistake the user can mend; the message says how."""


class ConfigError(UserError):
    """A key or a value of the configuration that cannot be used."""


class DataError(UserError):
    """Data that is missing, damaged or unfit for what was asked."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model."""


class RunError(UserError):
    """A run that does not exist, cannot be read or is in the wrong state."""


class RecipeError(UserError):
    """A recipe that breaks its contract with the engine."""
