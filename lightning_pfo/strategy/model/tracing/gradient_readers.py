"""Who looks at the gradients of layers of other ranks: a norm of what it finds is that of one rank.

Gradients of a rank's own layers are there, those of placeholders are None, and all that goes over the parameters of a
module skips these without a word. Hence placeholders tell who has asked. Optimizers and libraries that go over all
parameters know what they do; functions for norms and code of the user's do not.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from lightning_pfo.strategy.compat.patches import Patches

_NORMS = ("grad_norm",)
"""Of Lightning; others treat each gradient on its own, are given a norm, or know all stages."""
_KNOW_BETTER = ("torch.", "lightning.", "pytorch_lightning.", "lightning_pfo.", "accelerate.")


@dataclass(frozen=True)
class Reader:
    """Code that has asked for the gradient of a placeholder.

    Attributes:
        name: Its function.
        place: File and line.
    """

    name: str
    place: str

    def told(self, norm: str, whole: str, *, in_step: bool) -> str:
        """What is said of it.

        Args:
            norm: The call that gives the norm over all stages.
            whole: The context in which all ranks have all gradients.
            in_step: Whether a step is under way.
        """
        if in_step:
            return (
                f"{self.name} ({self.place}) reads gradients in a step. There they are those of microbatches of the "
                f"same batch that have run backward by then, on this rank's stages, and None for others; on one device "
                f"they are those of the step before. Read them in on_before_optimizer_step (in a loop of your own "
                f"before optimizer.step()), where {norm} gives the norm over all stages, called on every rank."
            )
        return (
            f"{self.name} ({self.place}) reads gradients of layers of other ranks, which are None here: pass over them "
            f"(if parameter.grad is not None); what it makes of all gradients, such as a norm, is that of this rank's "
            f"stages. For the norm over all stages call {norm} on every rank; within `with {whole}:` every rank has "
            f"those of all stages. Random numbers for gradients (noise) "
            f"come from a generator of their own (torch.randn(..., generator=noise)): else ranks, which draw other "
            f"amounts, go on with other numbers."
        )


Told = Callable[[torch.Tensor, Reader], object]
_told: list[Told] = []
KNOWN: set[types.CodeType] = set()
"""Code that need not be looked at again."""


def tell_of_readers(told: Told, patches: Patches) -> None:
    """Let somebody know who asks for the gradients of placeholders.

    Args:
        told: Called with a placeholder and the reader; once for each function.
        patches: Nobody is told when it is closed.
    """
    _told.append(told)
    KNOWN.clear()

    def forget() -> None:
        _told.remove(told)

    patches.callback(forget)


def note_reader(placeholder: torch.Tensor, frame: types.FrameType) -> None:
    """A frame asks for the gradient of a placeholder; not to be called for code in `KNOWN`."""
    if not _told:
        return
    code = _function_in(frame).f_code
    is_of_library = _module_of(frame).startswith(_KNOW_BETTER)
    KNOWN.add(frame.f_code)
    if (is_of_library and code.co_name not in _NORMS) or _is_of_optimizer(frame):
        return
    reader = Reader(code.co_name, place_of(frame))
    for told in list(_told):
        told(placeholder, reader)


def place_of(frame: types.FrameType | None) -> str:
    """File and line of the nearest code that is of no library that is known here."""
    asking = None if frame is None else _asking(frame)
    return "" if asking is None else f"{asking.f_code.co_filename}, line {asking.f_lineno}"


def _function_in(frame: types.FrameType) -> types.FrameType:
    """The frame of the function; before Python 3.12, comprehensions have frames of their own."""
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_of_optimizer(frame: types.FrameType) -> bool:
    """Whether an optimizer of anybody's makes its step; Lightning runs a user's hooks within one."""
    asking: types.FrameType | None = frame
    while asking is not None and not _module_of(asking).startswith(_KNOW_BETTER):
        first = asking.f_code.co_varnames[: asking.f_code.co_argcount][:1]  # whatever its name
        if first and isinstance(asking.f_locals.get(first[0]), Optimizer):
            return True
        asking = asking.f_back
    return False


def _asking(frame: types.FrameType) -> types.FrameType:
    """The nearest code that is of no library that is known here."""
    asking: types.FrameType | None = frame
    while asking is not None and _module_of(asking).startswith(_KNOW_BETTER):
        asking = asking.f_back
    return frame if asking is None else asking


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
