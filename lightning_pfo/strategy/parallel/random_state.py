"""Random numbers that all pipeline ranks agree on.

Stages draw different amounts (dropout), so the ranks' global generators would drift apart and with them shuffling:
ranks would silently train on different batches. Hence every step runs on generators seeded by (run, epoch, batch,
microbatch, stage), and the global generators are put back as they were.
"""

from __future__ import annotations

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
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `get_state` captured."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def same_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states that `get_state` captured are equal, so that nothing was drawn between them."""
    return all(_equal(a[name], b[name]) for name in a)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple) and not isinstance(a[0], int):  # NumPy's, which holds an array
        return all(map(_equal, a, b))
    return bool(a.tobytes() == b.tobytes()) if hasattr(a, "tobytes") else bool(a == b)


def portable_state() -> dict[str, Any]:
    """The global generators on the CPU, of tensors and plain values only, so that a checkpoint may hold them."""
    state = get_state(torch.device("cpu"))
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        state["numpy"] = (str(name), torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_portable_state(state: dict[str, Any]) -> None:
    """Put back what `portable_state` captured."""
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        state = {**state, "numpy": (name, keys.numpy().astype("uint32"), *rest)}
    if "numpy" in state and "numpy" not in sys.modules:
        del state["numpy"]
    set_state(state, torch.device("cpu"))


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Leave the global generators as they were before the block."""
    state = get_state(device)
    try:
        yield
    finally:
        set_state(state, device)


def seed(device: torch.device, *parts: int) -> None:
    """Seed the global generators (of torch: CPU and `device`) from a tuple of integers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(value >> 1)  # torch.manual_seed asks every backend: 90 times slower
    if device.type == "cuda":
        torch.cuda.manual_seed(value >> 1)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value & 0xFFFFFFFF)


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
