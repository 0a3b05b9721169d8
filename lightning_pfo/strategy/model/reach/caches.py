"""Caches of the whole process (`functools.lru_cache`), which a run on the meta device must not fill.

A model that keeps what it computes in such a cache (29 files of transformers do) would find tensors without values
there when it runs for real, on this stage and in every other model of the process.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
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
            # objects refer to their type; asking for those takes half as long as looking at all objects
            referrers = gc.get_referrers(_CACHE)
            self._found = [weakref.ref(cache) for cache in referrers if type(cache) is _CACHE and _counts(cache)]
        return [cache for reference in self._found if (cache := reference()) is not None]


def _counts(cache: Any) -> bool:
    package = str(getattr(cache, "__module__", "")).partition(".")[0]
    return package not in _HOLD_NO_RESULTS
