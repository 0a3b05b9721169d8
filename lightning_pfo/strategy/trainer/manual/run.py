"""One run of a step that optimizes by itself, on a microbatch: what it is to do to the model is noted, and not done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import is_not
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass
from lightning_pfo.strategy.coupling import needs_other_gradients
from lightning_pfo.strategy.model.reach.flags import note_backward
from lightning_pfo.strategy.model.tracing.stage_run import StageRun
from lightning_pfo.strategy.model.tracing.tracked import current_run, following, plain
from lightning_pfo.strategy.model.variables import users_line
from lightning_pfo.strategy.step.effects.outward.calls import with_values
from lightning_pfo.strategy.step.effects.outward.noted import Call, note_call
from lightning_pfo.strategy.step.effects.within import runs_forward_only, step_ends_here
from lightning_pfo.strategy.trainer.manual.afterwards import Afterwards
from lightning_pfo.strategy.trainer.manual.settings import Moment, RunSettings

BACKWARD = "manual_backward"
SET = "settings"
_OF_MODULE = (BACKWARD, "clip_gradients")
_OF_OPTIMIZERS = ("step", "zero_grad")


@dataclass(frozen=True)
class Which:
    """Stands for an object that every rank has.

    Attributes:
        kind: `module`, `optimizer` (as `self.optimizers()` gives it), `bare` (that of torch) or `scheduler`.
        index: Which of them; of modules the name.
    """

    kind: str
    index: int | str = 0


class Do:
    """A call that is to be made for the batch; its arguments are settings, the same for all microbatches.

    No dataclass, since these are taken apart and put together by parts.
    """

    def __init__(self, on: Which, name: str, *args: Any, **kwargs: Any) -> None:
        self.on = on
        self.name = name
        self.args = args
        self.kwargs = kwargs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Do) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.on, self.name))


class Targets:
    """What a step may call to optimize.

    Args:
        trainer: The Trainer; it has made its optimizers.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.module = trainer.lightning_module
        optimizers = self.module.optimizers()
        self.optimizers: list[Any] = optimizers if isinstance(optimizers, list) else [optimizers]
        self.bare = [optimizer.optimizer for optimizer in self.optimizers]
        self.needs_others = [*map(needs_other_gradients, self.bare)]
        self.schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        loop = trainer.fit_loop.epoch_loop.manual_optimization
        self.progress = loop.optim_step_progress.total
        self.outputs = loop.output_result_cls
        self.named: dict[int, Which] = {}
        for kind, objects in (("optimizer", self.optimizers), ("bare", self.bare), ("scheduler", self.schedulers)):
            self.named |= {id(each): Which(kind, index) for index, each in enumerate(objects)}

    def moment(self) -> Moment:
        """Their settings as they are now."""
        return Moment(self.bare, self.schedulers, self.progress)

    def find(self, which: Which) -> Any:
        """The object that something stands for."""
        if which.kind == "module":
            return self.module.get_submodule(str(which.index))
        of_kind = {"optimizer": self.optimizers, "bare": self.bare, "scheduler": self.schedulers}[which.kind]
        return of_kind[int(which.index)]


class ManualRun:
    """A context in which a step runs on a microbatch.

    Args:
        targets: What it may call.
        held: Parameters that this rank holds.
        past: Settings at the begin of the batch, and after each call that earlier phases of it have made.
    """

    def __init__(self, targets: Targets, held: Sequence[nn.Parameter], past: Sequence[Moment] = ()) -> None:
        self._calls: list[Call] = []
        self._past = past
        self._passed = 0
        self._targets = targets
        self._held = held
        self._losses: list[torch.Tensor] = []
        self._position = 0
        self._acted = False
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._open = ExitStack()
        self._afterwards: Afterwards | None = None

    def __enter__(self) -> ManualRun:
        targets = self._targets
        self._settings = RunSettings(targets.bare)
        self._completed = targets.progress.completed
        self._gradients = self._gradients_now()
        self._followed_by = current_run()
        for name, stand_in in zip(_OF_MODULE, (self._backward, self._clip), strict=True):
            self._replace(targets.module, name, stand_in)
        for optimizer in (*targets.optimizers, *targets.bare):
            for name, make in zip(_OF_OPTIMIZERS, (self._step_of, self._zero_of), strict=True):
                self._replace(optimizer, name, make(optimizer))
        for scheduler in targets.schedulers:
            self._replace(scheduler, "step", self._scheduler_step_of(scheduler, scheduler.step))
        if self._past:
            self._past[0].show()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        for attributes, name, before in reversed(self._replaced):
            if before is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = before
        if self._past:
            self._past[-1].show()
        self._settings.put_back()
        self._targets.progress.completed = self._completed

    def outcome(self, result: Any) -> dict[str, Any] | None:
        """What the pipeline takes for the result of the step: the loss that was given to `manual_backward`, and it.

        Raises:
            ConfigurationError: If it has changed gradients by itself.
            MisconfigurationException: If it returns what Lightning does not take.
        """
        self._note_settings()
        self._leave()
        if any(map(is_not, self._gradients_now(), self._gradients)):
            raise ConfigurationError(
                "On a pipeline training_step runs for each microbatch, and the gradients of those before are there "
                "meanwhile; it sets p.grad by itself. Call optimizer.zero_grad() or zero_grad() of a module instead, "
                "or set them in a hook such as on_before_optimizer_step."
            )
        if not isinstance(result, (torch.Tensor, dict)):
            self._targets.outputs.from_training_step_output(result)  # Lightning says what a step may return
        if self._losses:
            return {"loss": sum(self._losses[1:], self._losses[0]), "returned": result}
        if self._past or result is not None:  # nothing is differentiated
            return {"loss": torch.zeros((), requires_grad=True), "returned": result}
        return None

    def outcome_of_phase(self) -> tuple[dict[str, Any], list[Call]]:
        """The same of a phase that is not the last one, on its end, and what the step does after it."""
        with following(None):
            losses = plain(self._losses)
            loss = sum(losses[1:], losses[0]) if losses else torch.zeros((), requires_grad=True)
        return {"loss": loss}, list(map(with_values, self._calls))

    def zero(self, part: nn.Module, set_to_none: bool) -> bool:
        """Note that a module zeroes the gradients of its parameters; tells whether it is part of the user's."""
        name = next((name for name, module in self._targets.module.named_modules() if module is part), None)
        if name is None:
            return False
        if not self._is_past():
            self._note(Do(Which("module", name), "zero_grad", set_to_none=set_to_none))
        return True

    def _leave(self) -> None:
        self._open.close()
        self._afterwards = None

    def _gradients_now(self) -> list[torch.Tensor | None]:
        with following(None), DisableTorchFunctionSubclass():
            return [parameter.grad for parameter in self._held]

    def _replace(self, target: Any, name: str, stand_in: Callable[..., Any]) -> None:
        attributes = vars(target)
        self._replaced.append((attributes, name, attributes.get(name, _ABSENT)))
        attributes[name] = stand_in

    def _is_past(self) -> bool:
        """Whether a call was made by an earlier phase; what it has set is seen then."""
        if self._passed + 1 >= len(self._past):
            return False
        self._passed += 1
        self._past[self._passed].show()
        return True

    def _note(self, do: Do, *args: Any, changed: Iterable[nn.Parameter] = (), **kwargs: Any) -> None:
        self._note_settings()
        parameters = [] if runs_forward_only() else list(changed)
        if parameters or (self._losses and do.name in (*_OF_OPTIMIZERS, "clip_gradients")):
            self._acted = not runs_forward_only()
            _tell(None, parameters)
        self._note_one(do, *args, **kwargs)

    def _note_settings(self) -> None:
        if self._passed + 1 < len(self._past):
            return
        for index, changes in self._settings.changes():
            self._note_one(Do(Which("bare", index), SET, changes))

    def _note_one(self, do: Do, *args: Any, **kwargs: Any) -> None:
        call = (_DUE, (str(self._position), do, *args), kwargs)  # a text: numbers are compared with one device
        self._calls.append(call)
        note_call(call)
        self._position += 1

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._is_past():
            return
        kwargs.pop("retain_graph", None)  # nobody frees it before the step has ended
        if args or kwargs:
            raise ConfigurationError(
                f"On a pipeline self.manual_backward takes a loss, and retain_graph; got {[*args, *kwargs]} at "
                f"{users_line()} Multiply the loss by what its gradient is to be."
            )
        is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1
        if step_ends_here() and not (is_loss and (loss.requires_grad or not torch.is_grad_enabled())):
            raise ConfigurationError(
                f"On a pipeline self.manual_backward takes a one-element tensor that depends on the model's output; at "
                f"{users_line()} it got {_described(loss)}. Give it the loss itself."
            )
        if self._acted:
            self._next_phase()
        self._note(Do(Which("module", ""), BACKWARD))
        note_backward()
        loss = loss.reshape(()) if loss.dim() else loss
        _tell(loss)
        self._losses.append(loss)
        self._look_out().has_gradients = True

    def _look_out(self) -> Afterwards:
        if self._afterwards is None:
            self._afterwards = self._open.enter_context(Afterwards())
        return self._afterwards

    def _next_phase(self) -> None:
        """Another backward follows, in a run that is not of one phase, or ends here."""
        if isinstance(self._followed_by, StageRun):
            self._followed_by.end_phase()
        self._losses.clear()
        self._acted = False

    def _clip(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        on = self._targets.named.get(id(optimizer))
        if on is None:
            raise ConfigurationError(
                f"self.clip_gradients takes one of self.optimizers(); got {type(optimizer).__name__} at {users_line()}"
            )
        if not self._is_past():
            self._note(Do(Which("module", ""), "clip_gradients", on, *args, **kwargs))

    def _step_of(self, optimizer: Any) -> Callable[..., None]:
        which = self._targets.named[id(optimizer)]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def step(closure: Any = None, **kwargs: Any) -> Any:
            loss = None
            if closure is not None:
                bare = int(which.index)
                if self._targets.needs_others[bare]:
                    raise ConfigurationError(
                        f"{type(self._targets.bare[bare]).__name__} calls its closure several times in a step, or with "
                        f"other weights than the step began with, which a step on a pipeline cannot: {users_line()} "
                        f"Use another optimizer; or automatic optimization, in which it may call its closure as it "
                        f"likes."
                    )
                with torch.enable_grad():  # as optimizers call it
                    loss = closure()
            if self._is_past():
                return loss
            self._note(Do(which, "step", **kwargs), changed=parameters)
            if not runs_forward_only():  # then all phases are one
                self._look_out().step(parameters)
            if isinstance(optimizer, LightningOptimizer):
                self._targets.progress.completed += 1  # which is `trainer.global_step`
            return loss

        return step

    def _zero_of(self, optimizer: Any) -> Callable[..., None]:
        which = self._targets.named[id(optimizer)]

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if not self._is_past():
                self._note(Do(which, "zero_grad", *args, **kwargs))

        return zero_grad

    def _scheduler_step_of(self, scheduler: Any, ordinary: Callable[..., Any]) -> Callable[..., None]:
        which = self._targets.named[id(scheduler)]

        def step(*args: Any, **kwargs: Any) -> None:
            if self._is_past():
                return
            self._note(Do(which, "step"), *args, **kwargs)
            with following(None), torch.no_grad():
                self._settings.try_scheduler(scheduler, ordinary, *plain((args, kwargs)))

        return step


def _tell(loss: Any, changed: Sequence[nn.Parameter] = ()) -> None:
    run = current_run()
    if run is not None:
        run.optimize(loss, changed)


_ABSENT = object()
_DUE = tuple(("attribute", name) for name in ("trainer", "strategy", "manual", "due"))
"""Where the user's module finds what takes a call that is to be made."""


def _described(loss: Any) -> str:
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}"
    return f"a {type(loss).__name__}"
