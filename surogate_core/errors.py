"""The exceptions a user of Surogate sees. One base class, so that one `except` (and the command line) catches them all.

Every message says what was wrong and where (file, line, key, tensor); `hint` says what to do about it. A hint is kept
apart from the message so that a front end can set it on its own line.
"""

from __future__ import annotations


class SurogateError(Exception):
    """Base of every error that Surogate raises on purpose.

    `message`: what was wrong and where, one or more lines. `hint`: what to do, or None where the message says it already.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class ConfigError(SurogateError):
    """A configuration file, an override or a command-line argument that cannot be accepted."""


class DataError(SurogateError):
    """A data set that cannot be read, or rows that cannot be trained on."""


class WeightError(SurogateError):
    """A weight file, tokenizer or adapter that is damaged, incomplete or of the wrong shape."""


class PluginError(SurogateError):
    """A plugin that does not load, or a name that no plugin registers."""


class EngineError(SurogateError):
    """The native engine refused a program or failed while it ran one."""


class TrainingError(SurogateError):
    """A run that cannot go on: the loss is not finite, a checkpoint does not fit, memory does not suffice."""
