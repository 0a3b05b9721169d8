"""Units that tell each other something beside tensors: a counter of the file, a list that each takes an item from.

On a stage the units of earlier ones do not run, so such a unit would read another number there, silently. All that a
stage knows of such ways, through variables of any kind, are their consequences: run again, without those between, the
unit does something else each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pfo.strategy.model.tracing.forms.holders import holders_in
from lightning_pfo.strategy.model.tracing.forms.left import Kept
from lightning_pfo.strategy.model.variables import Variables

_PLAIN = (bool, int, float, complex, str)
"""Types of what is said to functions beside tensors."""


class Heard(TorchFunctionMode):
    """Notes the functions of torch that are called while it is entered, and the numbers that they are given.

    Attributes:
        said: What was noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.said.append((getattr(func, "__name__", ""), *_said(args), *_said(tuple((kwargs or {}).items()))))
        return func(*args, **(kwargs or {}))


def _said(values: Any) -> Iterator[Any]:
    for value in values:
        if type(value) in _PLAIN:
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _said(value)
        elif isinstance(value, slice):
            yield from _said((value.start, value.stop, value.step))


class FirstCall(Heard):
    """A call of a module that is heard, and may be made again to see whether it does something else then.

    Args:
        module: The module, before it is called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._before = Kept(module)

    def talks(self, owner: nn.Module, call: Callable[[Heard], Any]) -> bool:
        """Whether the call does other things each time when it is made again; a cache does so once.

        What the module keeps for itself is as before each time: a layer may count its own calls.

        Args:
            owner: The user's module.
            call: Makes it again, and lets it be heard; with the same random numbers, and without values.
        """
        kept = Kept(self._module)
        try:
            said = _heard(call)
            if said == self.said:
                return False
            is_own = _own_in(owner)
            for _ in range(2):
                self._before.put_back(is_own)
                last, said = said, _heard(call)
                if said in (self.said, last):
                    return False
        except Exception:
            return not self._before.has_lost_tensors()  # as from a list of what a decoder adds to its own
        finally:
            kept.put_back()
        return True


def _heard(call: Callable[[Heard], Any]) -> list[Any]:
    heard = Heard()
    call(heard)
    return heard.said


def _own_in(owner: nn.Module) -> Callable[[Any], bool]:
    """Tells of dicts, lists and attributes, as they are, whether one part alone of a module leads to them."""
    times = Counter(id(module) for _, module in owner.named_modules(remove_duplicate=False))
    ways: Counter[int] = Counter()
    for module in owner.modules():
        for _, _, holder in holders_in([module]):
            ways[id(holder)] += times[id(module)]
    return lambda holder: not isinstance(holder, Variables) and ways[id(holder)] == 1
