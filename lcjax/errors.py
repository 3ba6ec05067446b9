"""The package's own errors: each names what was expected and what to do."""


class LcjaxError(Exception):
    """Base of every error that lcjax raises on purpose."""


class CorruptDataError(LcjaxError, ValueError):
    """Stored bytes are damaged, truncated or not what their index says."""


class UnsupportedFormatError(LcjaxError, ValueError):
    """The bytes come from a format version that this release does not read."""


class MissingFileError(LcjaxError, FileNotFoundError):
    """A file that a checkpoint names is not there."""


class BaseMismatchError(LcjaxError, ValueError):
    """A delta was applied to a reference that it was not made against."""


class TreeMismatchError(LcjaxError, ValueError):
    """The saved tree and the target differ in leaves, shapes or structure."""


class UnsupportedLeafError(LcjaxError, TypeError, ValueError):
    """A leaf is of a type or dtype that lcjax does not store; Orbax raises ValueError."""


class PresetError(LcjaxError, ValueError):
    """No preset was named, or its name or options are not known."""
