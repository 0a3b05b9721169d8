"""All that the package uses of torch although it is not public.

`PRIVATE` lists the names, and what would break without each. `tests/test_compat.py` finds them in the installed
version, and finds none elsewhere.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CellType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch._functorch import apis, eager_transforms
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.flop_counter import flop_registry

from lightning_pfo.strategy.parallel.patches import Patches

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "IncompatibleKeys",
    "TorchDispatchMode",
    "abort_process_group",
    "flop_registry",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

SEEN_IN = "torch 2.6 to 2.15"
PRIVATE = {
    "torch.utils._pytree": (
        "Batches, outputs and arguments of any form could not be taken apart and put together; torch has no public "
        "module for it."
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "The bytes of an instruction could not be counted. The documentation names it, under this path."
    ),
    "torch.utils.flop_counter.flop_registry": (
        "The operations of an instruction could not be counted; `FlopCounterMode`, which is public, hooks into modules."
    ),
    "torch.optim.optimizer._global_optimizer_pre_hooks": "Hooks would hear of steps of copies of optimizers.",
    "torch.optim.optimizer._global_optimizer_post_hooks": "Hooks would hear of steps of copies of optimizers.",
    "torch._subclasses.fake_tensor.FakeTensorMode": (
        "What a module returns could only be found by computing it, with the memory that this takes."
    ),
    "torch._subclasses.fake_tensor.FakeTensor": (
        "Tensors without values could not be told from others, nor could the memory that they stand for be counted."
    ),
    "torch._C.DisableTorchFunctionSubclass": (
        "The values of tensors that are followed could not be computed with: each function would be followed again. "
        "The documentation names it, under this path."
    ),
    "torch.Tensor._make_wrapper_subclass": (
        "What another stage computes could not stand in a step as a tensor of its shape, dtype and device that has no "
        "memory. torch's own documentation of subclasses uses it."
    ),
    "torch._is_all_true": (
        "That distributions check their values (`validate_args`) would be taken for control flow: they would be sent, "
        "and stages could not be called again after it."
    ),
    "torch._C._current_graph_task_id": (
        "A collective call in the backward of a user's function would wait for ranks that do not make it. Nothing "
        "public tells whether autograd runs a backward."
    ),
    "torch._C._functions.NllLossBackward0._saved_reduction": (
        "A loss that becomes a sum where it was a mean before would be taken for one of the same kind."
    ),
    "torch._C._functions.NllLossBackward0._saved_weight": "So would one whose classes have weights from then on.",
    "torch._C._functions.NllLossBackward0._saved_target": (
        "A loss that takes other labels of its batch by turns would be weighed by those that the first has taken."
    ),
    "torch._C._functions.NllLossBackward0._saved_ignore_index": (
        "Padding that only later batches have would be noticed some batches later."
    ),
    "torch.Tensor._base": "What a tensor is a view of would not change with it on later stages.",
    "torch.Tensor._version": "Changes in place would be missed, and a later stage would get the value from before.",
    "torch.autograd._unsafe_preserve_version_counter": (
        "A weight that the step writes into would fail in the backward of a microbatch when another one has done the "
        "same; each finds it as it was before, with that version."
    ),
    "torch.UntypedStorage._cdata": (
        "Two values that share memory, one of which is changed later, would be sent without a word; `data_ptr` is the "
        "same for all that is empty."
    ),
    "torch.Tensor._post_accumulate_grad_hooks": (
        "Hooks on gradients that were added up would run for each microbatch, and not on the gradient of the batch."
    ),
    "torch.nn.Module._forward_hooks": (
        "Hooks on parts of a layer would see nothing on other ranks, as where models of transformers collect "
        "attentions; no public name tells of hooks."
    ),
    "torch.nn.Module._backward_hooks": (
        "Hooks on the backward of a layer would meet tensors that are followed, or are of other ranks: torch fails."
    ),
    "torch.nn.Module._backward_pre_hooks": "The same for those that are called before it.",
    "torch.nn.Module._is_full_backward_hook": "Those of the old kind, which torch sets up otherwise, would go too.",
    "torch.nn.Module._forward_pre_hooks": (
        "A module that is put together from parts of tensor parallelism would go on dividing its inputs; what torch "
        "computes weights with before a layer's forward (`weight_norm`) would run on other stages than the layer."
    ),
    "torch.nn.Module._parameters": (
        "Placeholders could not take the places of other ranks' parameters without the side effects of "
        "`__setattr__`, nor be told apart where a parameter has two names."
    ),
    "torch.nn.Module._buffers": "The same for buffers, of which `None` has to stay a buffer.",
    "torch.nn.Module._modules": "`named_children` leaves out a layer that a model calls in two places.",
    "torch.nn.Module._apply": "A module with placeholders could not be moved: `to` fails on the meta device.",
    "torch.nn.Module._compiled_call_impl": "Layers would stay compiled after training; `compile` cannot be undone.",
    "torch.nn.modules.module._IncompatibleKeys": (
        "`load_state_dict` of a pipelined model would return something else than that of a module."
    ),
    "torch.distributed.distributed_c10d._abort_process_group": (
        "Where a rank has died, the others would wait for their transfers until the timeout."
    ),
    "torch.distributed.distributed_c10d._process_group_name": (
        "Groups that only their processes make are named by how many groups these are in (up to torch 2.13): they "
        "would wait for each other for ever where that differs, and fail where a name comes again."
    ),
    "torch.distributed.tensor.DTensor._local_tensor": (
        "In-place changes of gradients and sums over their parts; `to_local` returns a view that autograd follows."
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups": (
        "Gradients of a schedule whose last backward is one of weights only would never be averaged over replicas. "
        "torch's pipeline stages do the same."
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group": (
        "The same with older torch, which has one group per layer at most."
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback": (
        "Gathered parameters would not be let go of at the end of an iteration."
    ),
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": (
        "A group of layers under `checkpoint` that a stage boundary cuts would run in backward from its begin, with "
        "layers that are elsewhere. From torch 2.15 on what is used has this name with `_impl` at its end."
    ),
    "torch.amp.GradScaler._unscale_grads_": (
        "Ranks would skip fp16 steps each by itself, and their weights drift apart."
    ),
    "torch._amp_foreach_non_finite_check_and_unscale_": "Every gradient would be unscaled and checked on its own.",
    "torch.ops.aten._local_scalar_dense": (
        "An optimizer, or a step, that looks at a value could not be tried with tensors that have none."
    ),
    "torch._functorch.apis.vmap_impl": "Steps could not use `torch.vmap` between layers.",
    "torch._functorch.eager_transforms.grad_impl": "Steps could not use `torch.func.grad` between layers.",
    "torch._functorch.eager_transforms.grad_and_value_impl": "The same of `torch.func.grad_and_value`.",
    "torch._functorch.eager_transforms._jvp_with_argnums": "The same of `torch.func.jvp`.",
    "torch._functorch.eager_transforms._vjp_with_argnums": "Of `torch.func.vjp` an untrue reason would be given.",
    "torch._foreach_mul_": "Every gradient would be scaled by a launch of its own.",
    "torch._foreach_clamp_min_": "Every gradient would be clipped by a launch of its own.",
    "torch._foreach_clamp_max_": "Every gradient would be clipped by a launch of its own.",
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict": (
        "Every rank would have to read a sharded checkpoint at the same time; the public `load` can be told otherwise "
        "from torch 2.7 on."
    ),
    "torch.serialization._get_layout": (
        "The index of a sharded checkpoint could not be read with weights_only=True: it names this function."
    ),
}
"""Private names, and what they are needed for."""
OLDER_LACK = {"torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups"}
"""Names that the newest versions have, and the oldest do not; they are looked for where they are used."""

OLDEST_FSDP = {"cpu": "2.9"}
"""The oldest torch that divides layers rightly, by device; 2.7 on others, as 2.6 has no `ignored_params`.

Up to 2.8, gloo returns the sum of gradients where FSDP2 asks for their mean, and says nothing.
"""
LAYOUT_READER = ("torch.serialization", "_get_layout")
"""Module and name of the function that a pickled layout of a tensor calls."""

READS_VALUE = torch.ops.aten._local_scalar_dense.default
"""The operator by which Python gets the value of a tensor."""

TensorT = TypeVar("TensorT", bound=torch.Tensor)


class Tensors(NamedTuple):
    """What a module itself holds, by name; changing them changes the module."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]


def tensors_of(module: nn.Module) -> Tensors:
    """The parameters and buffers that a module itself holds."""
    return Tensors(module._parameters, module._buffers)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a module, each once, under its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that a module itself holds, by name; one may have several. Changing it changes the module."""
    return module._modules


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """What modules themselves hold, each once; much faster than `parameters()`."""
    found: dict[int, nn.Parameter | None] = {}  # tensors themselves take long to hash
    for module in modules:
        if held := module._parameters:
            found.update((id(parameter), parameter) for parameter in held.values())
    return [parameter for parameter in found.values() if parameter is not None]


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and all within it, as `modules()` lists them, but in another order and in a third of the time."""
    found = {module: None}
    queue = [module]
    for each in queue:
        for child in each._modules.values():
            if child is not None and child not in found:
                found[child] = None
                queue.append(child)
    return queue


def accumulation_hooks_of(parameter: nn.Parameter) -> dict[int, Callable[[nn.Parameter], None]]:
    """What `register_post_accumulate_grad_hook` has registered; a change of the dict counts."""
    return parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined, no-any-return]


def gradient_hooks_of(parameter: nn.Parameter) -> dict[int, Callable[[torch.Tensor], torch.Tensor | None]]:
    """What `register_hook` has registered; a change of the dict counts."""
    return parameter._backward_hooks or {}  # type: ignore[return-value]


def forward_hooks_of(module: nn.Module) -> Collection[Callable[..., Any]]:
    """What is called after each forward of a module itself."""
    return module._forward_hooks.values()


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """What is called before each forward of a module itself, by keys of their handles; changes are made there."""
    return module._forward_pre_hooks


class BackwardHooks(NamedTuple):
    """What is called with each backward of a module, by keys of their handles, which remove them here."""

    before: dict[int, Callable[..., Any]]
    after: dict[int, Callable[..., Any]]


def backward_hooks_of(module: nn.Module) -> BackwardHooks:
    """The hooks on the backward of a module itself; none of the old kind, which torch sets up on its output."""
    is_old = module._is_full_backward_hook is False
    return BackwardHooks(module._backward_pre_hooks, {} if is_old else module._backward_hooks)


def take_backward_hooks_of(module: nn.Module, patches: Patches) -> BackwardHooks:
    """The same, and let the module have none until `patches` is closed."""
    hooks = backward_hooks_of(module)
    patches.set(module, "_backward_pre_hooks", OrderedDict())
    if module._is_full_backward_hook is not False:
        patches.set(module, "_backward_hooks", OrderedDict())
    return hooks


def drop_hooks_of_tensor_parallelism(module: nn.Module) -> None:
    """Let a module whose parameters are whole again take and return plain tensors: torch's hooks divide them."""
    for each in module.modules():
        for hooks in (each._forward_pre_hooks, each._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook.__module__.startswith("torch.distributed.tensor")]:
                hooks.pop(key)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of it, has been changed in place; those of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def change_mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one after a change in place, or of `data`."""
    return version_of(tensor), memory_of(tensor)


def version_restorer(tensor: torch.Tensor) -> Callable[[], None]:
    """What sets the version of a tensor back to that of now, for who gives it back the values of now."""
    keeper = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    return lambda: keeper.__exit__()


def kind_of_operation(operation: Any) -> str:
    """What an operation of autograd's graph does; of a loss with what it does to its parts, such as adding them up.

    Of one of labels also whether classes have weights.
    """
    saved = _saved_by(operation.__class__)
    kind = f"{operation.name()} {operation._saved_reduction if '_saved_reduction' in saved else ''}"
    is_weighted = _is_of_labels(operation) and operation._saved_weight is not None
    return f"{kind} by class" if is_weighted else kind


def ignored_label_of(operation: Any) -> int | None:
    """Which label has no part in what an operation of autograd's graph does; None of one without labels."""
    if not _is_of_labels(operation):
        return None
    ignored = int(operation._saved_ignore_index)
    return ignored - 2**64 if ignored >= 2**63 else ignored  # torch shows a number below 0 so


def target_of(operation: Any) -> torch.Tensor | None:
    """The labels, or other targets, that a loss in autograd's graph was computed for; None of other operations."""
    return operation._saved_target if "_saved_target" in _saved_by(operation.__class__) else None


def _is_of_labels(operation: Any) -> bool:
    return "_saved_ignore_index" in _saved_by(operation.__class__) and str(operation.name()).startswith("NllLoss")


@lru_cache(maxsize=256)
def _saved_by(kind: Any) -> frozenset[str]:
    """Which of these an operation of a kind has saved; each class has its own, and to ask an object takes long."""
    names = ("_saved_reduction", "_saved_target", "_saved_ignore_index")
    return frozenset(name for name in names if hasattr(kind, name))


def in_backward() -> bool:
    """Whether this thread runs a function of autograd's backward."""
    number: int = torch._C._current_graph_task_id()
    return number != -1


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors share that share memory; one of its own for a tensor without, as inside of `vmap`."""
    if isinstance(tensor, DTensor):
        tensor = local_tensor(tensor)
    try:
        number: int = tensor.untyped_storage()._cdata
    except NotImplementedError:
        return -id(tensor)
    return number


def reserved_memory(tensor: torch.Tensor) -> object:
    """What keeps the number of a tensor's memory its own as long as it is held, though the memory itself may go."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except NotImplementedError:
        return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own or shares that of others; sparse ones and most wrappers have none."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, DTensor)
    return tensor.layout == torch.strided and not tensor.is_meta and is_plain


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of; None if it is none."""
    return tensor._base


LACKS_GRADIENTS = "does not require grad"
"""In what torch says where something is differentiated that has no gradients."""

CHECKS = frozenset({torch._is_all_true, torch.Tensor._is_all_true})
"""Functions whose answer is looked at only to raise an error where it is not True."""


def without_memory(cls: type[TensorT], form: torch.Tensor) -> TensorT:
    """A tensor of a subclass in the form of another, without memory."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
        cls,
        form.shape,
        strides=form.stride(),
        dtype=form.dtype,
        device=form.device,
        requires_grad=form.requires_grad,
    )


def form_without_values(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    """A tensor without values, for where the mode is; it takes an eighth of the time that functions of torch do there.

    Args:
        mode: The mode, which must not be entered.
        shape: Its shape.
        stride: Its strides; None: it is contiguous.
        dtype: Its dtype.
        device: Where it says that it lies.
        requires_grad: Whether it is a leaf that needs gradients.
    """
    make = partial(torch.empty, shape) if stride is None else partial(torch.empty_strided, shape, stride)
    return FakeTensor(mode, make(dtype=dtype, device="meta", requires_grad=requires_grad), device)


def map_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace all tensors of a module, with their gradients, as `to` does."""
    module._apply(change)  # type: ignore[no-untyped-call]


def forget_compiled(module: nn.Module) -> None:
    """Undo `module.compile()`."""
    module._compiled_call_impl = None


class ModuleWithPlaceholders(nn.Module):
    """A module whose `to`, `cuda`, `bfloat16` leave tensors on the meta device there, in the type that all get."""

    def types_have_changed(self) -> None:
        """Tensors have other types from now on."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        changes = False

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal changes
            if not tensor.is_meta:
                found = fn(tensor)
            else:
                dtype = fn(torch.empty(0, dtype=tensor.dtype)).dtype
                found = tensor if dtype == tensor.dtype else tensor.to(dtype)
            changes = changes or found.dtype != tensor.dtype
            return found

        applied = super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        if changes:
            self.types_have_changed()
        return applied


Recompute = Callable[..., Generator[None, None, None]]
"""What surrounds the forward of a function under `torch.utils.checkpoint`, without reentrance: up to its `yield`."""


_RECOMPUTES = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
"""What `checkpoint` calls: up to torch 2.14, and from 2.15 on, where the former is for others only."""


def recompute_with(make: Callable[[Recompute], Recompute], patches: Patches) -> None:
    """Let `torch.utils.checkpoint` do something else around forwards, made from what it does."""
    module, older, newer = torch.utils.checkpoint, *_RECOMPUTES
    name = newer if hasattr(module, newer) else older
    patches.set(module, name, make(getattr(module, name)))


@contextmanager
def name_of_group(name: str) -> Iterator[None]:
    """Let a group that is made meanwhile have a name, which no other has had."""
    with Patches() as patches:
        patches.set(distributed_c10d, "_process_group_name", lambda *args, **kwargs: name)
        yield


Transform = Callable[..., Any]
_TRANSFORMS = {"vmap": (apis, "vmap_impl"), "grad": (eager_transforms, "grad_impl")}
_TRANSFORMS["grad_and_value"] = (eager_transforms, "grad_and_value_impl")
_TRANSFORMS["jvp"] = (eager_transforms, "_jvp_with_argnums")
_TRANSFORMS["vjp"] = (eager_transforms, "_vjp_with_argnums")


def transform_with(make: Callable[[str, Transform], Transform], patches: Patches) -> None:
    """Let functions of `torch.func` do what `make` returns for their names and what they do.

    Args:
        make: Makes it.
        patches: Undoes it when it is closed.
    """
    for name, (module, attribute) in _TRANSFORMS.items():
        patches.set(module, attribute, make(name, getattr(module, attribute)))


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This process's part, sharing memory with `tensor`, unseen by autograd."""
    return tensor._local_tensor


def finish_backward(layer: FSDPModule) -> None:
    """Do what FSDP2 does in the hooks of the last backward: average gradients, let go of gathered parameters."""
    from torch.distributed.fsdp import fully_shard  # here, for those who divide nothing

    state = fully_shard.state(layer)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            group.post_backward()
    state._root_post_backward_final_callback()


def load_alone(tensors: dict[str, torch.Tensor], reader: StorageReader) -> None:
    """Fill tensors from a sharded checkpoint; nothing is communicated."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # here, for those who load none

    _load_state_dict(tensors, reader, no_dist=True)


Unscale = Callable[[Optimizer, torch.Tensor, torch.Tensor, bool], dict[torch.device, torch.Tensor]]
"""Takes an optimizer, 1 / scale, a flag to set where a gradient overflowed, and whether gradients may be fp16."""


def unscale_with(scaler: GradScaler, unscale: Unscale, patches: Patches) -> None:
    """Let `unscale` do what a scaler does with the gradients of an optimizer; it returns its flag by device."""
    patches.set(scaler, "_unscale_grads_", unscale)


def unscale_in_place(gradients: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiply with `inv_scale`, and set `found_inf` to 1 where a result is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)


def scale_in_place(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors with one factor."""
    for device in {tensor.device for tensor in tensors}:
        torch._foreach_mul_([tensor for tensor in tensors if tensor.device == device], factor.to(device))


def clamp_in_place(tensors: list[torch.Tensor], limit: float) -> None:
    """Limit all elements to `-limit` .. `limit`."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


@contextmanager
def emptied(registries: Collection[dict[int, Any]]) -> Iterator[None]:
    """Let hooks hear nothing while the context is open: what holds them is empty."""
    before = [dict(registered) for registered in registries]
    for registered in registries:
        registered.clear()
    try:
        yield
    finally:
        for registered, functions in zip(registries, before, strict=True):
            registered.update(functions)


@contextmanager
def optimizer_hooks_aside() -> Iterator[None]:
    """Let the hooks that are for the steps of all optimizers hear nothing while the context is open.

    One of them may have opened it, while others are still to be called: what holds them does not change.
    """
    with Patches() as patches:
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            patches.set(sys.modules[Optimizer.__module__], name, OrderedDict())
        yield


def cell_of(function: Callable[..., Any]) -> CellType | None:
    """Where a function that torch has decorated has the one that it calls; None: it is none, or otherwise."""
    is_of_torch = getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")
    inner = getattr(function, "__wrapped__", None) if is_of_torch else None

    def holds_it(cell: CellType) -> bool:
        """Or what somebody has put there around it."""
        held = cell.cell_contents
        return callable(held) and inspect.unwrap(held, stop=lambda each: each is inner) is inner

    return None if inner is None else next(filter(holds_it, function.__closure__ or ()), None)  # type: ignore[attr-defined]


_CLIPS: Any = torch.nn.utils.clip_grad_norm_.__wrapped__  # type: ignore[attr-defined]
_CELL = cell_of(torch.nn.utils.clip_grad_norm_)
"""Where torch's function, which switches autograd off, has the one that clips; None: a torch that does otherwise."""


def clip_norms_with(clip: Callable[..., torch.Tensor] | None) -> None:
    """Let `torch.nn.utils.clip_grad_norm_` do something else, also for those who have imported it by its name.

    Args:
        clip: Called with what torch's own does, and its arguments. None: it does that.
    """
    if _CELL is not None:
        _CELL.cell_contents = _CLIPS if clip is None else partial(clip, _CLIPS)
