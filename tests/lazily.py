"""Modules that are imported at their first use, so that a process that only collects tests does not wait for them."""

from typing import Any

import pytest


class Lazy:
    """A module that is imported when an attribute is asked for; a test that asks for one is skipped if it is not installed.

    Names that begin with an underscore are not looked up: pytest asks every global of a test file for several of them.
    """

    def __init__(self, name: str, reason: str | None = None) -> None:
        self._name, self._reason = name, reason

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name, reason=self._reason), attribute)
