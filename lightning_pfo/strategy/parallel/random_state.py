"""Random numbers that all pipeline ranks agree on.

Stages draw different amounts (dropout), so the ranks' global generators would drift apart and with them shuffling:
ranks would silently train on different batches. Hence every step runs on generators seeded by (run, epoch, batch,
microbatch, stage), and the global generators are put back as they were.

To seed those of the host, Python's and NumPy's, in each microbatch is a part of what a short step costs that can be
measured, and few steps draw from them. So it is done from the first trace or step on that has been seen to
(`notice_draws_on_host`).
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_pfo.strategy.parallel.groups import tell_all


def get_state(device: torch.device) -> dict[str, Any]:
    """Capture the global generators of torch (CPU and `device`), Python and, where it is imported, NumPy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), **_host_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `get_state` captured."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and _numpy_state() is not state["numpy"]:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _host_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state()
    return state


def _numpy_state() -> Any:
    """NumPy's state; the same object as the last time, if its memory is as it was: NumPy takes long to tell it.

    Only what was seeded anew and has drawn one normal number, where it had drawn two before, is taken for the same.
    """
    global _known_of_numpy
    memory = _memory_of_numpy()
    known, state = _known_of_numpy
    if memory is None or memory != known:
        state = sys.modules["numpy"].random.get_state(legacy=memory is not None)
        # there may be a number of a normal distribution in store, which lies elsewhere
        _known_of_numpy = None if memory is None or state[3] else memory, state
    return state


def _memory_of_numpy() -> bytes | None:
    """The memory of NumPy's global generator, if that is of the usual kind: 624 numbers of 32 bits and a position."""
    numpy = sys.modules["numpy"]
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


_known_of_numpy: tuple[bytes | None, Any] = (None, None)


def same_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states that `get_state` captured are equal, so that nothing was drawn between them."""
    return all(_equal(a[name], b[name]) for name in a)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if a is b:
        return True
    if isinstance(a, tuple) and not isinstance(a[0], int):  # NumPy's, which holds an array
        return all(map(_equal, a, b))
    if isinstance(a, dict):  # that of another kind of NumPy's
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    return bool(a.tobytes() == b.tobytes()) if hasattr(a, "tobytes") else bool(a == b)


def portable_state() -> dict[str, Any]:
    """The global generators on the CPU, of tensors and plain values only, so that a checkpoint may hold them."""
    state = get_state(torch.device("cpu"))
    if isinstance(state.get("numpy"), tuple):
        name, keys, *rest = state["numpy"]
        state["numpy"] = (str(name), torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_portable_state(state: dict[str, Any]) -> None:
    """Put back what `portable_state` captured."""
    if isinstance(state.get("numpy"), tuple):
        name, keys, *rest = state["numpy"]
        state = {**state, "numpy": (name, keys.numpy().astype("uint32"), *rest)}
    if "numpy" in state and "numpy" not in sys.modules:
        del state["numpy"]
    set_state(state, torch.device("cpu"))


@contextmanager
def isolated(device: torch.device) -> Iterator[dict[str, Any]]:
    """Leave the global generators as they were before the block, which gets their state."""
    state = get_state(device)
    try:
        yield state
    finally:
        set_state(state, device)


def seed(device: torch.device, *parts: int) -> None:
    """Seed the global generators (of torch: CPU and `device`) from a tuple of integers."""
    value = _seed_torch(device, parts)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value & 0xFFFFFFFF)


def seed_step(device: torch.device, *parts: int) -> None:
    """The same for a step, but for generators of the host as long as none has drawn from them."""
    if _draws_on_host:
        seed(device, *parts)
    else:
        _seed_torch(device, parts)


_64_BITS = (1 << 64) - 1


def _seed_torch(device: torch.device, parts: tuple[int, ...]) -> int:
    value = hash(parts) & _64_BITS  # that of integers is the same in all processes
    torch.default_generator.manual_seed(value >> 1)  # torch.manual_seed asks every backend: 90 times slower
    if device.type == "cuda":
        torch.cuda.manual_seed(value >> 1)
    return value


_draws_on_host = False


def notice_draws_on_host(before: Mapping[str, Any]) -> bool:
    """Seed generators of the host too from now on, if somebody has drawn from them since `before` was captured.

    Returns:
        Whether that is so, and was not known.
    """
    global _draws_on_host
    if _draws_on_host or same_state(_host_state(), before):
        return False
    _draws_on_host = True
    return True


def expect_draws_on_host() -> None:
    """Seed generators of the host too from now on."""
    global _draws_on_host
    _draws_on_host = True


def synchronise(group: dist.ProcessGroup | None = None) -> int:
    """Give every process the CPU generators of the first one and return a seed derived from them; a collective call."""
    cpu = torch.device("cpu")
    state = get_state(cpu)
    # as an array: to pickle a tensor is to call `torch.save`, which somebody may watch or replace
    told = tell_all({**state, "torch": state["torch"].numpy()}, group)
    set_state({**told, "torch": torch.from_numpy(told["torch"])}, cpu)
    return torch.initial_seed()


def fingerprint(group: dist.ProcessGroup | None = None) -> int:
    """A number that tells the present state of the first process's CPU generator from others; a collective call."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=6).digest()
    number: int = tell_all(int.from_bytes(digest, "little"), group)
    return number
