"""Modules that are imported at their first use, so that a process that only collects tests does not wait for them."""

import importlib
from typing import Any


class Lazy:
    """A module that is imported when an attribute is asked for.

    Names that begin with an underscore are not looked up: pytest asks every global of a test file for several of them.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
