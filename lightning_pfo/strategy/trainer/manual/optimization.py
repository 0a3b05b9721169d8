"""Manual optimization on microbatches.

The user's step runs for each microbatch, as any other, and its loss is what it gives to `manual_backward`. What it does
to gradients, weights and learning rates is noted where the step ends, and done on every rank once for the batch, in the
step's own order, when the pipeline has all gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.autograd import LACKS_GRADIENTS
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.tracing.ends import OtherPathError, PhaseEnded
from lightning_pfo.strategy.model.tracing.gradient_readers import place_of
from lightning_pfo.strategy.model.variables import users_line
from lightning_pfo.strategy.step.effects.outward.calls import make_calls
from lightning_pfo.strategy.step.effects.outward.noted import Call
from lightning_pfo.strategy.step.programs import Programs
from lightning_pfo.strategy.trainer.manual.run import BACKWARD, SET, Do, ManualRun, Targets, Which
from lightning_pfo.strategy.trainer.manual.settings import Moment, apply

Step = Callable[..., Any]


class ManualOptimization:
    """Runs steps of a module that optimizes by itself.

    Args:
        trainer: The Trainer, in `fit`.
        patches: Undoes what it changes in torch.
    """

    def __init__(self, trainer: pl.Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self._run: ManualRun | None = None
        self._changes_path = False
        self._past: list[Moment] = []
        self._noted: list[list[Call]] = []
        self._due: list[tuple[int, Do, tuple[Any, ...], dict[str, Any]]] = []
        patches.set(nn.Module, "zero_grad", self._zeroing(nn.Module.zero_grad))
        patches.set(torch.autograd, "backward", self._refusing(torch.autograd.backward))
        patches.callback(register_optimizer_step_pre_hook(self._refuse_unknown).remove)

    def of(self, step: Step, held: list[nn.Parameter]) -> Step:
        """A step that optimizes by itself as one that returns its loss, in a dict.

        Args:
            step: The user's step.
            held: Parameters that this rank holds.
        """
        targets = Targets(self._trainer)
        self._past, self._noted = [], []

        def run(*args: Any) -> Any:
            self._run = ManualRun(targets, held, self._past)
            try:
                with self._run as of_microbatch:
                    try:
                        result = step(*args)
                    except PhaseEnded:
                        outcome, calls = of_microbatch.outcome_of_phase()
                        self._noted.append(calls)
                        return outcome
                    return of_microbatch.outcome(result)
            finally:
                self._run = None

        return run

    def noted(self) -> list[list[Call]]:
        """The calls of each microbatch in the phase that has run; see `Between`."""
        noted, self._noted = self._noted, []
        return noted

    def act(self, loss: torch.Tensor | None, calls: Sequence[Call]) -> None:
        """Do what the step does after a phase; see `Between`."""
        make_calls(self._trainer.lightning_module, calls, {}, is_first=False)
        targets = Targets(self._trainer)
        if not self._past:
            self._past.append(targets.moment())
        self._do_due(targets, loss, self._past)

    def due(self, position: str, do: Do, *args: Any, **kwargs: Any) -> None:
        """Take a call that a step has noted.

        Args:
            position: How many come before it, in digits.
            do: What is called.
            args: What else it is called with.
            kwargs: The same.
        """
        self._due.append((int(position), do, args, kwargs))

    def train(self, run: Callable[..., Any], programs: Programs) -> Any:
        """Run the step of a batch, and do what it has noted, on every rank.

        Args:
            run: Runs it on the pipeline.
            programs: What stages do of it.

        Returns:
            What the step has returned for the batch.

        Raises:
            ConfigurationError: If it was not the same for all microbatches.
        """
        # where there are several, a step may run other parts of the model for each
        programs.follows_each_batch = self._changes_path or len(self._trainer.optimizers) > 1
        while True:
            try:
                outcome = run(between=self)
                break
            except OtherPathError as error:
                if programs.follows_each_batch or self._past:
                    raise ConfigurationError(str(error)) from error
                self._changes_path = programs.follows_each_batch = True
        self._do_due(Targets(self._trainer), None if outcome is None else outcome["loss"])
        return None if outcome is None else outcome.get("returned")

    def _do_due(self, targets: Targets, loss: torch.Tensor | None, past: list[Moment] | None = None) -> None:
        due, self._due = self._due, []
        if [position for position, *_ in due] != list(range(len(due))):
            calls = list(dict.fromkeys(f"{do.name} of {do.on.kind} {do.on.index}".strip() for _, do, *_ in due))
            raise ConfigurationError(
                f"A step that optimizes by itself does so alike for all microbatches of a batch, since it is done once "
                f"for all of them; here some differ, in these or in what they are given: {', '.join(calls)}. Decide by "
                f"what microbatches have in common, such as batch_idx."
            )
        last = max((position for position, do, *_ in due if do.name == BACKWARD), default=-1)
        for position, do, args, kwargs in due:
            target = targets.find(do.on)
            if do.name == SET:
                for group, name, value in do.args[0]:
                    apply(target.param_groups[group], {name: value})
                continue
            if do.name != BACKWARD:
                settings = [targets.find(each) if isinstance(each, Which) else each for each in do.args]
                getattr(target, do.name)(*settings, *args, **do.kwargs, **kwargs)
            elif position == last and loss is not None:
                target.manual_backward(loss)
            if past is not None:
                past.append(targets.moment())

    def _zeroing(self, ordinary: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            if self._run is None or not self._run.zero(module, set_to_none):
                ordinary(module, set_to_none)

        return zero_grad

    def _refuse_unknown(self, optimizer: Optimizer, *_: Any) -> None:
        if self._run is not None:  # where steps of known ones are noted, and not made
            raise ConfigurationError(
                f"On a pipeline a step optimizes with what configure_optimizers returns; this "
                f"{type(optimizer).__name__} is none of these: {users_line()} Return it there, and take it "
                f"from self.optimizers()."
            )

    def _refusing(self, ordinary: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:
            if self._run is not None:
                raise ConfigurationError(
                    f"On a pipeline a loss is given to self.manual_backward, since stages run backward one after the "
                    f"other; the step runs backward by itself: {users_line()} Call self.manual_backward(loss)."
                )
            try:
                ordinary(*args, **kwargs)
            except RuntimeError as error:
                if LACKS_GRADIENTS not in str(error):
                    raise
                raise ConfigurationError(
                    f"What a step on a pipeline has computed and kept has no graph behind it, as its layers are on "
                    f"several ranks; a hook runs backward from it ({place_of(inspect.currentframe())}). Call "
                    f"self.manual_backward(loss), and what steps the optimizer, in training_step. ({error})"
                ) from error

        return backward
