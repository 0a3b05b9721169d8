"""Files that a step itself opens to write: each run of the step does so, on each stage that comes to that line."""

from __future__ import annotations

import builtins
import inspect
import io
import os
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.variables import is_library
from lightning_pfo.strategy.step.batches.notices import warn_once

_OWN_BUSINESS = ("torch.", "lightning.", "pytorch_lightning.", "lightning_pfo.", "logging")
"""Compilers keep what they make, for example."""
_told: set[str] = set()


@contextmanager
def openings_told(*, counts: bool) -> Iterator[None]:
    """Name files that a step opens to write, while the context is open.

    Args:
        counts: Whether it is run to its end, for real; else nothing is added to a file.
    """
    with Patches() as patches:
        thread = threading.get_ident()
        ordinary = builtins.open

        def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            writes = isinstance(mode, str) and not set("wax+").isdisjoint(mode)
            if writes and threading.get_ident() == thread and not isinstance(file, int):
                place = _place(inspect.currentframe())
                if place:
                    _tell(file, place)
                    if not counts and "a" in mode:
                        file = os.devnull
            return ordinary(file, mode, *args, **kwargs)

        patches.set(builtins, "open", opened)
        patches.set(io, "open", opened)
        save = torch.save

        def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:  # torch opens files by code that is not Python
            place = _place(inspect.currentframe()) if isinstance(f, (str, os.PathLike)) else ""
            if place and threading.get_ident() == thread:
                _tell(f, place)
            save(obj, f, *args, **kwargs)

        patches.set(torch, "save", saved)
        yield


def _tell(file: Any, place: str) -> None:
    if place not in _told:
        _told.add(place)
        warn_once(
            f"A step opens {os.fspath(file)!r} to write ({place}). Each microbatch does so, on each rank of the "
            f"pipeline that comes to that line, and so do the runs that compare the first batches with one device (to "
            f"the end of files these add nothing). Write after the step (in on_train_batch_end, or your loop), on the "
            f"first rank (trainer.is_global_zero, accelerator.is_main_process), what the step returns or keeps in "
            f"attributes; or keep a file open in an attribute, into which the first rank writes, once for a batch."
        )


def _place(frame: types.FrameType | None) -> str:
    """File and line of the user's that opens something, itself or by a library; nothing if it is nobody's."""
    frame = frame.f_back if frame is not None else None
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_OWN_BUSINESS):
            return ""
        if not is_library(name):
            return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""
