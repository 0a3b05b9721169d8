"""How modules and parameters are switched (`train`, `eval`, `requires_grad_`), and what a step switches meanwhile."""

from __future__ import annotations

from torch import nn

from lightning_pfo.strategy.compat.modules import modules_of, parameters_of
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass

Changed = tuple[dict[int, bool], dict[int, bool]]
"""The modules and the parameters that are switched otherwise, by their place in the model, and how."""


class Flags:
    """How the modules and parameters of a model are switched now: `training` and `requires_grad`.

    A stage that ends a step early leaves them as they are in the middle of it: frozen for one call, or evaluating.

    Args:
        root: The outermost module.

    Attributes:
        modules: It, and those within it.
        parameters: What these hold.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = modules_of(root)
        self.parameters = parameters_of(self.modules)
        self._training, self._trained = self._now()
        self._all_trained = all(self._trained)
        self._thawed: set[int] = set()
        self._noted: set[int] | None = None

    @property
    def at_first(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """How modules and parameters were switched when this was made; may be compared."""
        return tuple(self._training), tuple(self._trained)

    def take_changes(self) -> Changed:
        """Return what has been switched since, and switch it back."""
        training, trained = self._now()
        changed = _differing(training, self._training), _differing(trained, self._trained)
        if any(changed):
            self._switch({i: self._training[i] for i in changed[0]}, {i: self._trained[i] for i in changed[1]})
        return changed

    def begin_run(self) -> None:
        """A run of a step begins, switched as at first."""
        _noting.append(self)
        self.freeze()

    def end_run(self, *, looks: bool = True) -> Changed:
        """Return what a run of a step has switched, and switch it back; but not what its backward still needs.

        That adds nothing to the gradients of parameters that are not trained meanwhile. Those that were when the run
        ended, or where it has noted a backward, are until another run begins, or `freeze` is called.

        Args:
            looks: Whether it may have switched anything.
        """
        _noting.remove(self)
        noted, self._noted = self._noted, None
        if not looks:
            return {}, {}
        thawed = self._thawed_now() if noted is None else noted
        changed = self.take_changes()
        self._thawed = thawed
        self._switch({}, dict.fromkeys(thawed, True))
        return changed

    @property
    def has_thawed(self) -> bool:
        """Whether something is trained only for a backward."""
        return bool(self._thawed)

    def freeze(self) -> None:
        """Switch back what was left switched for a backward."""
        if self._thawed:
            self._switch({}, dict.fromkeys(self._thawed, False))
            self._thawed = set()

    def _thawed_now(self) -> set[int]:
        """The parameters that are trained now, and were not at first."""
        if self._all_trained:
            return set()
        return {index for index, now in _differing(self._now()[1], self._trained).items() if now}

    def _note(self) -> None:
        self._noted = (self._noted or set()) | self._thawed_now()

    def apply(self, changed: Changed) -> None:
        """Switch what has been switched elsewhere."""
        self._switch(*changed)

    def _now(self) -> tuple[list[bool], list[bool]]:
        with DisableTorchFunctionSubclass():  # placeholders would take ten times as long
            return [module.training for module in self.modules], [p.requires_grad for p in self.parameters]

    def _switch(self, training: dict[int, bool], trained: dict[int, bool]) -> None:
        for index, value in training.items():
            self.modules[index].training = value
        for index, value in trained.items():
            self.parameters[index].requires_grad_(value)


_noting: list[Flags] = []
"""Those of runs that are under way, the innermost last."""


def note_backward() -> None:
    """A step differentiates something now: what is trained at this moment gets gradients."""
    for flags in _noting[-1:]:
        flags._note()


def _differing(now: list[bool], before: list[bool]) -> dict[int, bool]:
    if now == before:
        return {}
    return {index: a for index, (a, b) in enumerate(zip(now, before, strict=True)) if a != b}
