"""Stand-ins for what calls of a step return, which are made when the batch is done; see `calls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.variables import users_line

Path = tuple[tuple[str, Any], ...]
"""How what is called is reached from the module: names of attributes, and items; a metric is a `ToldMetric`.

One that begins with `("result", number)` is reached from what the call of that number has returned, of those of its
microbatch; in calls of a batch a path ends with `("returns", number)`, the number that others know the call by.
"""
Call = tuple[Path, tuple[Any, ...], dict[str, Any]]
Note = Callable[[Call], Any]
"""Takes a call, and returns its number where there is one."""

RESULT, RETURNS = "result", "returns"
EXIT = ("attribute", "__exit__")
THERE = {"logger": 2, "attribute": 2, "stream": 1, RESULT: 0}
"""Up to how many steps on a path from such a begin something is known to be there before calls are made."""

noting: list[Note] = []
"""What takes calls of the steps that are under way, the innermost last."""


def note_call(call: Call) -> None:
    """Have a call made on every rank when the batch is done, if it is noted where the step ends; see `calls`."""
    if noting:
        noting[-1](call)


def path_of(noted: Noted) -> Path:
    """How it is reached; of its own attributes it says others are meant."""
    path: Path = vars(noted)["_path"]
    return path


class Noted:
    """Stands for something of which only the calls count, and for what these return.

    Calls of it may have others of these as arguments. Two of the same path are equal; what it really is nobody knows
    before the calls are made.

    Args:
        path: How it is reached.
        note: Takes the calls; None: nobody does any more.

    Raises:
        ConfigurationError: If somebody must know what it is, or calls it after its step.
    """

    def __init__(self, path: Path, note: Note | None = None) -> None:
        vars(self).update(_path=path, _note=note)

    def __reduce__(self) -> Any:
        return Noted, (self._path,)

    def _at(self, kind: str, name: Any) -> Noted:
        return Noted((*self._path, (kind, name)), self._note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call."""
        if self._note is None or not noting or noting[-1] is not self._note:
            raise ConfigurationError(
                f"A step has kept something of a logger or writer, or what a call of it returned, and that is used "
                f"after the step: {users_line()} Get it in a hook, such as on_train_start, where several steps use it."
            )
        return Noted(((RESULT, self._note((self._path, args, kwargs))),), self._note)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._at("attribute", name)

    def __getitem__(self, key: Any) -> Any:
        return self._at("attribute", "__getitem__")(key) if isinstance(key, Noted) else self._at("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._at("attribute", "__setitem__")(key, value)

    def __delitem__(self, key: Any) -> None:
        self._at("attribute", "__delitem__")(key)

    def __setattr__(self, name: str, value: Any) -> None:
        self._at("attribute", "__setattr__")(name, value)

    def __delattr__(self, name: str) -> None:
        self._at("attribute", "__delattr__")(name)

    def __enter__(self) -> Any:
        return self._at("attribute", "__enter__")()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._at(*EXIT)(kind, error, None)  # a traceback cannot be sent, and keeps much alive

    def __bool__(self) -> bool:
        return self._is_there() or self._unknown()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Noted) and other._path == self._path:
            return True
        return not self._is_there() and self._unknown()

    def __hash__(self) -> int:
        return hash(self._path)

    def _is_there(self) -> bool:
        """Whether it is a writer, a logger's experiment or a method: nobody needs to make calls to know that."""
        return len(self._path) <= THERE[self._path[0][0]]

    def _unknown(self, *_: Any) -> Any:
        raise ConfigurationError(
            f"Calls of loggers and writers in a step are made once for a batch, when that is done, so that the step "
            f"does not know what they return, or what loggers have in attributes and items. It may give that to other "
            f"such calls, call or enter it; this line needs it at once: {users_line()} Do that in a hook, such as "
            f"on_train_start or on_train_batch_end."
        )


# not `__len__` and `__next__`, by which containers and iterators are told, and which Python names by itself
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
for _name in (
    *("str", "bytes", "int", "float", "complex", "index", "iter", "contains", "fspath"),
    *("lt", "le", "gt", "ge", "neg", "abs", "round", *_OPERATORS, *(f"r{each}" for each in _OPERATORS)),
):
    setattr(Noted, f"__{_name}__", Noted._unknown)
