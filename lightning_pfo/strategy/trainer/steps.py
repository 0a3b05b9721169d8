"""What Lightning asks a strategy to do with batches: steps, gradients between them, and checks of batch sizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.strategy.build import Pipeline
from lightning_pfo.strategy.compat.patches import Patches, all_of
from lightning_pfo.strategy.model.batch_norm import least_samples
from lightning_pfo.strategy.model.reach.untouched import attributes_untouched, untouched
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.clipping import Norms
from lightning_pfo.strategy.parallel.loss_scaling import loss_scale_of
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.check import check_same_batch, sample_of
from lightning_pfo.strategy.step.batches.weights import label_leaves
from lightning_pfo.strategy.step.effects.fresh import anew
from lightning_pfo.strategy.step.effects.within import step_under_way
from lightning_pfo.strategy.step.fetching import batch_of, fetching, loader_of
from lightning_pfo.strategy.step.first_batch.ahead import read_ahead
from lightning_pfo.strategy.step.memory.report import MemoryReport
from lightning_pfo.strategy.step.memory.watch import MemoryWatch
from lightning_pfo.strategy.step.microbatches import (
    declared_batch_size,
    declared_sizes,
    default_num_microbatches,
    evaluation_microbatches,
    too_few_samples,
)
from lightning_pfo.strategy.step.runner import Outputs
from lightning_pfo.strategy.trainer.callbacks.listening import gradients_are_stale, outputs_are_wanted, silence_writers
from lightning_pfo.strategy.trainer.checkpointing import CheckpointStrategy
from lightning_pfo.strategy.trainer.checks import with_checked_output
from lightning_pfo.strategy.trainer.compat import (
    SKIPPED,
    before_transfer,
    evaluation_data,
    training_data,
    training_loaders,
)
from lightning_pfo.strategy.trainer.first_rank import for_first_rank
from lightning_pfo.strategy.trainer.manual.optimization import ManualOptimization
from lightning_pfo.strategy.trainer.precision import scaler_of
from lightning_pfo.strategy.trainer.together import together

_CHECKED_BATCHES = 3  # compare all of the batches of all ranks this often at the start of each epoch ...
_CHECK_EVERY = 50  # ... and then once in so many batches, of others a sample
_SEED_OF = {"validation": 1, "test": 1, "predict": 2}
_STEP_OF: dict[Any, str] = {
    TrainerFn.VALIDATING: "validation",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}
_GATHERED: dict[str, Outputs] = {"all": "all", "rank0": "first", "none": "last"}


class StepStrategy(CheckpointStrategy):
    """Base of strategies that run the user's steps on a pipeline, once it is split.

    Attributes:
        manual: What runs steps that optimize by themselves; None: they do not.
    """

    manual: ManualOptimization | None = None
    _pipeline: Pipeline | None = None
    _norms: Norms | None = None
    _memory: MemoryWatch | None = None
    _num_microbatches: int | None = None
    _is_number_given = False
    _first_size: int | None = None
    _first_loaders: Sequence[Any] = ()
    _sizes: tuple[Any, Collection[int]] = (None, ())
    _label_leaves: Mapping[str, Any] | None = None
    _next_label_leaves: Mapping[str, Any] | None = None
    _next_sample: int = 0
    _accumulating = False
    _is_averaged = False
    _gather = "all"
    _partition: str
    _batching: Batching
    _patches: Patches
    _evaluated = 0
    _evaluation_seed = 0

    @abstractmethod
    def _make_schedule(self, num_microbatches: int) -> PipelineSchedule:
        """Make the schedule of training iterations."""

    @property
    def instruction_source(self) -> InstructionSource:
        """Where listeners subscribe to instruction events.

        Raises:
            RuntimeError: Before `setup`.
        """
        return self._get_pipeline().engine

    @property
    def memory_report(self) -> MemoryReport | None:
        """How much memory each rank takes in training; None before the first step, or if nobody asked for it."""
        return None if self._memory is None else self._memory.report

    def _get_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError("Accessing the pipeline before setup() is not possible; use it from on_fit_start on.")
        return self._pipeline

    @property
    @override
    def _last_rank(self) -> int:
        return self._get_pipeline().engine.last_rank

    @property
    @override
    def _is_split(self) -> bool:
        return self._pipeline is not None

    @override
    def _reseed(self, seed: int) -> None:
        self._seed = self._get_pipeline().engine.seed = seed

    @override
    def on_train_start(self) -> None:
        if not self._is_number_given:  # another training, as in search of a batch size, may have larger batches
            size = declared_batch_size(self._module().trainer.train_dataloader) or self._first_size
            self._first_size = None
            if size is None:
                self._num_microbatches = None
            else:
                self._choose_num_microbatches(size)

    def _default_num_microbatches(self, batch_size: int) -> int:
        least = least_samples(self._module())
        return default_num_microbatches(batch_size, self.mesh.num_ranks, self._make_schedule, least)

    def _choose_num_microbatches(self, batch_size: int) -> None:
        before = self._num_microbatches
        self._num_microbatches = self._default_num_microbatches(batch_size)
        if self._num_microbatches == before:
            return
        self._get_pipeline().engine.set_num_microbatches(self._num_microbatches)
        if said := too_few_samples(batch_size, self._num_microbatches, self.mesh.num_ranks):
            rank_zero_warn(f"pfo_pipeline: {said}")
            return
        rank_zero_info(
            f"pfo_pipeline: batches of {batch_size} are split into "
            f"{counted(self._num_microbatches, 'microbatch', 'microbatches')}."
        )

    def _first_step(self) -> Callable[[torch.device], Any] | None:
        """What runs `training_step` on a first microbatch; None where training would miss something by it."""
        module = self._module()
        item, self._first_loaders = self._first_item(training_data, "max_size_cycle")
        if item is None:
            return None
        training_step, rest = module.training_step, _given_besides(module.training_step, 0)
        if self.manual is not None:
            self._make_optimizers()
            training_step = self.manual.of(training_step, [])

        def step(device: torch.device) -> Any:
            with self._first_microbatch(item[0], device) as microbatch, self.precision_plugin.train_step_context():
                return training_step(microbatch, *rest)

        return step

    def _provide_optimizers(self) -> bool:
        """Make optimizers for a first look that has failed, perhaps as its step asks for them; tells whether it has."""
        if self.manual is not None or self._module().trainer.state.fn != TrainerFn.FITTING:
            return False
        self._make_optimizers()
        return True

    def _make_optimizers(self) -> None:
        """Make those that a first look has; they are made anew after the split."""
        module = self._module()
        with untouched(module, values=False):
            self.setup_optimizers(module.trainer)

    def _first_evaluation(self) -> Callable[[torch.device], Any] | None:
        """The same of an evaluation that begins with a module that is whole; None also where layers are measured."""
        module = self._module()
        if self._partition == "profile":
            return None
        item, loaders = self._first_item(evaluation_data, "sequential")
        if item is None:
            return None
        name = f"{_STEP_OF[module.trainer.state.fn]}_step"
        evaluation_step = getattr(module, name)
        rest = _given_besides(evaluation_step, *((0, 0) if len(loaders) > 1 else (0,)))

        def step(device: torch.device) -> Any:
            context = self.precision_plugin.predict_step_context()
            with self._first_microbatch(item[0], device) as microbatch, context, torch.no_grad():
                module.eval()
                return evaluation_step(microbatch, *rest)

        return step

    def _first_item(self, data_of: Callable[[pl.Trainer], Any], mode: Any) -> tuple[Any, Sequence[Any]]:
        """What loaders yield first, with the number of the batch; None where something would be missed; the loaders."""
        module = self._module()
        first = self._loading_rank()
        owners = (module, getattr(module.trainer, "datamodule", None))
        as_they_are = all_of(attributes_untouched(owner, but_made=True) for owner in owners)
        # making it may draw numbers, as does the order of its samples, or count how often it is made
        with random_state.isolated(self.root_device), as_they_are:
            data = data_of(module.trainer)
            found = data if isinstance(data, CombinedLoader) else CombinedLoader(data, mode)

            def load() -> Any:
                if not all(
                    isinstance(loader, Iterable) or hasattr(loader, "__getitem__") for loader in found.flattened
                ):
                    return None  # Lightning says so
                with read_ahead(found, found.flattened, (module, module.trainer)) as source:
                    if source is None and self._partition != "profile":
                        return None
                    items = found if source is None else source
                    return next((item for item in items if item[0] is not None), None)  # Lightning leaves out None

            item = load() if first is None else first.do("the first batch", load)
        (is_missed,) = self.meet("a look at a first batch", [item is None])  # a replica may have none at all
        return None if is_missed else item, found.flattened

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; what may be labels is kept as it is, as nobody need wait for it there."""
        self._next_label_leaves = label_leaves(batch, waits=False)
        self._next_sample = 0 if self.root_device.type == "cpu" else sample_of(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @contextmanager
    def _first_microbatch(self, batch: Any, device: torch.device) -> Iterator[Any]:
        """A first microbatch of a batch, while a step runs that is traced or measured."""
        module, is_divided = self._module(), self._num_microbatches != 1 and self.mesh.num_ranks > 1
        data_module = getattr(module.trainer, "datamodule", None)
        with attributes_untouched(data_module), step_under_way(ends_here=False):
            arrived = before_transfer(module, self.precision_plugin.convert_input(anew(batch, copies=True)))
            arrived = self.batch_to_device(arrived, device)
            self._first_size = size = self._batching.size_of(arrived, is_divided=is_divided)
            number = self._num_microbatches or self._default_num_microbatches(size)
            yield self._batching.split(arrived, number)[0]

    def _trains_side_by_side(self) -> bool:
        """Whether batches are put together from those of several loaders, part for part."""
        loaders = training_loaders(self._module().trainer)
        return len(self._first_loaders if loaders is None else loaders.flattened) > 1

    def _expected_sizes(self) -> Collection[int]:
        """How many samples the loaders of the present loop say that their batches have."""
        trainer = self._module().trainer
        if trainer.training:
            loaders = trainer.train_dataloader
            loaders = self._first_loaders if loaders is None else loaders
        elif trainer.predicting:
            loaders = trainer.predict_dataloaders
        else:
            loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        if self._sizes[0] is not loaders:
            self._sizes = (loaders, declared_sizes(loaders))
        return self._sizes[1]

    def _begin(self, what: str, batch: Any) -> None:
        """All ranks come to a step, whose batch is the one that was moved last, if it was."""
        self.meet(what, same=sample_of(batch) ^ self._next_sample)
        self._next_sample = 0
        self._label_leaves, self._next_label_leaves = self._next_label_leaves, None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch_idx = self._module().trainer.fit_loop.batch_idx
        batch, rest = batch_of(args)
        self._begin(f"training step of batch {batch_idx}", batch)
        if self._num_microbatches is None:
            batching = self._get_pipeline().runner.batching
            self._choose_num_microbatches(batching.size_of(batch, is_divided=self.mesh.num_ranks > 1))
        assert self._num_microbatches is not None
        self._check_batch(batch, batch_idx)
        # what comes before it must be reduced too, and together with it
        manual = self.manual
        fresh = gradients_are_stale(self._module())
        # of steps that optimize by themselves each is reduced by itself: when another one steps, nobody knows
        self._is_averaged = manual is not None or (fresh and not self._accumulating)
        step = self._step("training_step")
        if manual is not None:
            step = manual.of(step, self._get_pipeline().held)
        what = (step, self._num_microbatches, self._training_seed(), batch, rest)
        with self.precision_plugin.train_step_context():
            is_wanted = outputs_are_wanted(self._module(), "on_train_batch_end")
            if self._memory is not None:
                keeps = not fresh or self._module().trainer.accumulate_grad_batches > 1
                self._memory.before_step(*what, self.optimizers, keeps_gradients=keeps, wants_outputs=is_wanted)
            runner = self._get_pipeline().runner
            train = partial(
                runner.train,
                *what,
                loss_scale_of(scaler_of(self.precision_plugin), self.root_device),
                average=self._is_averaged,
                keep_gradients=not fresh,
                outputs="all" if is_wanted else "nobody",
                tells=is_wanted,
            )
            result = train() if manual is None else manual.train(train, runner.programs)
        buffers = self._get_pipeline().buffers
        if buffers is not None and (manual is not None or not self._accumulating):
            buffers.keep()
        return SKIPPED if result is None and manual is None else result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict", args, _GATHERED[self._gather])

    def _evaluate(self, kind: str, args: Any, outputs: Outputs = "all") -> Any:
        batch, rest = batch_of(args)
        self._begin(f"{kind} step number {self._evaluated}", batch)
        self._check_batch(batch, self._evaluated)
        self._evaluated += 1
        runner = self._get_pipeline().runner
        is_wanted = outputs_are_wanted(self._module(), f"on_{kind}_batch_end")
        if kind != "predict" and not is_wanted:
            outputs = "nobody"
        size = runner.batching.evaluation_size_of(batch)
        return runner.evaluate(
            kind,
            self._step(f"{kind}_step"),
            evaluation_microbatches(size, self._num_microbatches, self.mesh.num_ranks),
            (_SEED_OF[kind], self.mesh.replica, self._evaluation_seed, self._evaluated),
            batch,
            rest,
            outputs=outputs,
            tells=is_wanted,
            loader=loader_of(rest),
        )

    def _step(self, name: str) -> Callable[..., Any]:
        step = getattr(self._module(), name)
        if name == "training_step" and self._module().automatic_optimization:
            step = with_checked_output(step)
        return for_first_rank(fetching(step), lambda: self.global_rank)

    def _training_seed(self) -> tuple[int, ...]:
        trainer = self._module().trainer
        return (0, self.mesh.replica, trainer.current_epoch, trainer.global_step, trainer.fit_loop.batch_idx)

    def _begin_evaluation(self) -> None:
        """Random numbers of an evaluation derive from those of the process, as they are when it begins, and go on."""
        self.meet("begin of an evaluation")
        self._evaluated = 0
        self._evaluation_seed = random_state.fingerprint(self.mesh.pipeline_group)

    @override
    def on_train_end(self) -> None:
        self.meet("end of training")
        self.finish_saving()

    @override
    def on_validation_end(self) -> None:
        self.meet("end of validation")

    @override
    def on_test_end(self) -> None:
        self.meet("end of testing")

    @override
    def on_predict_end(self) -> None:
        self.meet("end of prediction")

    @override
    def on_validation_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation()
        engine = self._get_pipeline().engine
        if engine.rank != (engine.last_rank if self._gather == "none" else 0):
            silence_writers(self._module().trainer, self._patches)

    def _check_batch(self, batch: Any, index: int) -> None:
        if index < _CHECKED_BATCHES or index % _CHECK_EVERY == 0:
            check_same_batch(batch, self.mesh.pipeline_group, self.root_device)
            if self.mesh.tensor_group is not None:
                check_same_batch(batch, self.mesh.tensor_group, self.root_device)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _average_accumulated(self) -> None:
        """After a backward: `on_after_backward` sees gradients as they are after the reduction, as under DDP."""
        pipeline = self._get_pipeline()
        if pipeline.means is not None and not self._accumulating and not self._is_averaged:
            pipeline.means.average(pipeline.held)

    @together
    def grad_norm(self, parameters: Iterable[nn.Parameter] | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the gradients of all stages together; a collective call, as from `on_before_optimizer_step`.

        Lightning's `grad_norm(module, 2)` has those of the stages that this rank holds.

        Args:
            parameters: Those that count; None: all.
            norm_type: Of which norm; above 0, or infinity.
        """
        if self._norms is None:
            raise RuntimeError("There are gradients in fit() only; ask for their norm in its hooks.")
        counted = list(self._module().parameters() if parameters is None else parameters)
        return self._norms.of(counted, float(norm_type), called="trainer.strategy.grad_norm")


def _given_besides(step: Callable[..., Any], *numbers: int) -> tuple[int, ...]:
    """Of the numbers of a batch and its loader those that Lightning gives a step: it need not take the former."""
    return numbers if is_param_in_hook_signature(step, "batch_idx", min_args=2) else numbers[1:]
