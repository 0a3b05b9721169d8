"""What Hydra needs on newer versions of Python; see `strategy.compat`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SEEN_IN = "hydra 1.3.8, python 3.14"
PRIVATE: dict[str, str] = {}
"""Nothing private is used."""


@contextmanager
def helps_of_any_kind() -> Iterator[None]:
    """Let parsers take a help that is no text but makes one when it is shown, as Hydra's of `--shell-completion`.

    Python 3.14 looks for `%` in the help of each option, and no Hydra application gets beyond that.
    """
    add_argument = argparse.ArgumentParser.add_argument

    def add(parser: argparse.ArgumentParser, *flags: str, **options: Any) -> argparse.Action:
        text = options.get("help") or ""
        if not hasattr(text, "__contains__"):
            type(text).__contains__ = _holds_no_format  # type: ignore[method-assign]
        return add_argument(parser, *flags, **options)

    argparse.ArgumentParser.add_argument = add  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del argparse.ArgumentParser.add_argument


def _holds_no_format(_: object, text: str) -> bool:
    return False
