"""What loading a model can say to an operator: one clear line each, the file named, no traceback needed."""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model cannot be served: the file is missing, damaged, or of a kind we do not know."""


class DemoModelUnavailable(ModelLoadError):
    """The demo model is neither on disk nor to be had; the message says what to do."""
