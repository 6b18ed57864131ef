"""Mistakes a user can mend: shown as one sentence with exit code 2, never as a traceback. Standard library only."""


class UserError(Exception):
    """Says what is wrong and what to do."""


class ConfigError(UserError):
    """A setting is unknown or cannot work."""


class OptionError(ConfigError, ValueError):
    """An option of an environment or an algorithm is unknown or cannot work; the sentence begins with its name."""


class FinishedError(ConfigError):
    """The run is complete; the command line says so with exit code 0."""


class CheckpointError(UserError):
    """A checkpoint is missing or damaged."""


class MissingExtraError(UserError):
    """An optional package is not installed."""


class ShortOfMemoryError(UserError):
    """Something needed more memory than there was."""


class DiskError(UserError):
    """A file or folder cannot be written."""
