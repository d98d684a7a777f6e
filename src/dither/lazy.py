"""Names of packages that are imported when they are first used, so that files beside them can be read without torch."""

import importlib
import sys
from collections.abc import Callable, Mapping


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package whose names are defined in its modules.

    The package also imports the names under `if TYPE_CHECKING`, for type checkers and editors.

    Args:
        package: `__name__` of the package.
        modules: The names by module, separated by spaces; the module is below the package unless it has a dot.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        if name in modules and name not in home:
            return importlib.import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = home[name] if "." in home[name] else f"{package}.{home[name]}"
        value: object = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
