"""Runs a function when a module is imported, by any code, so that this package need not import it itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_actions: dict[str, Callable[[], None]] = {}
_searched: set[str] = set()
"""The modules that other finders are being asked for: one of them may ask all finders, including this one."""


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call `action` at the end of every import of `module` from its file; at once if it has been imported.

    Args:
        module: the full name of a module. It need not exist.
        action: a function that may be called again. The import raises what it raises.
    """
    if not any(finder is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)
    _actions[module] = action
    if module in sys.modules:
        action()


class _Finder:
    """Finds the modules of `_actions` by the other finders of `sys.meta_path`."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module, as Python's import system specifies."""
        if name not in _actions or name in _searched:
            return None
        _searched.add(name)
        try:
            others = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        finally:
            _searched.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _actions[name])  # type: ignore[assignment]
        return spec


class _Loader:
    """A module's loader, which calls a function once it has run the module."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        """Run a module, as Python's import system specifies."""
        module.__spec__.loader = module.__loader__ = self._loader  # what others find in the module
        self._loader.exec_module(module)
        self._action()
