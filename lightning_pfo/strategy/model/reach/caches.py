"""Caches of the whole process (`functools.lru_cache`), which a run on the meta device must not fill.

A model that keeps what it computes in such a cache (29 files of transformers do) would find tensors without values
there when it runs for real, on this stage and in every other model of the process.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_CACHE = type(functools.lru_cache(lambda: None))
_HOLD_NO_RESULTS = {"torch", *sys.stdlib_module_names}
"""Packages whose caches hold facts about types and operators, and are left alone."""


class Caches:
    """All caches of the process, found anew when modules have been imported since."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[Any]] = []
        self._num_modules = 0

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Clear each cache that something was put into while the context is open."""
        before = {id(cache): cache.cache_info().misses for cache in self._all()}
        try:
            yield
        finally:
            for cache in self._all():
                if cache.cache_info().misses != before.get(id(cache), 0):
                    cache.cache_clear()

    def _all(self) -> list[Any]:
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            self._found = _search()
        return _living(self._found)


def freeze() -> None:
    """`gc.freeze`, without hiding caches that there are by now from who asks for all objects."""
    global _hidden, _latest
    _hidden = _search()
    gc.freeze()
    _latest = _new_cache()


def _new_cache() -> Any:
    return functools.lru_cache(lambda: None)


_hidden: list[weakref.ref[Any]] = []
"""Caches that are found among frozen objects."""
_latest: Any = None
"""Made after these were found, so that it is among all objects until they are frozen again."""


def _search() -> list[weakref.ref[Any]]:
    global _hidden, _latest
    # objects refer to their type; asking for those takes half as long as looking at all objects
    found = gc.get_referrers(_CACHE)
    is_hidden = gc.get_freeze_count() > 0 if _latest is None else all(cache is not _latest for cache in found)
    if is_hidden:  # by the user, or whatever has started this process
        _hidden = _references(_in_modules())
    if is_hidden or _latest is None:
        _latest = _new_cache()
    return _references([*found, *_living(_hidden)])


def _references(objects: Iterable[Any]) -> list[weakref.ref[Any]]:
    caches = {id(cache): cache for cache in objects if type(cache) is _CACHE and _counts(cache)}
    return [*map(weakref.ref, caches.values())]


def _living(references: list[weakref.ref[Any]]) -> list[Any]:
    return [cache for reference in references if (cache := reference()) is not None]


def _in_modules() -> Iterator[Any]:
    """The caches of functions and classes, also of those that others wrap."""
    seen: set[int] = set()
    looked_at = [value for module in [*sys.modules.values()] for value in [*getattr(module, "__dict__", {}).values()]]
    while looked_at:
        value = looked_at.pop()
        kind = type(value)  # not `isinstance`: there are modules whose values are imported when they are asked
        if kind in (staticmethod, classmethod):
            looked_at.append(value.__func__)
        elif id(value) in seen:
            continue
        elif issubclass(kind, type):
            looked_at += vars(value).values()
        elif kind is _CACHE:
            yield value
        elif kind is types.FunctionType:
            looked_at.append(getattr(value, "__wrapped__", None))
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    looked_at.append(cell.cell_contents)
        seen.add(id(value))


def _counts(cache: Any) -> bool:
    package = str(getattr(cache, "__module__", "")).partition(".")[0]
    return package not in _HOLD_NO_RESULTS
