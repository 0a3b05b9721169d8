"""What cuBLAS takes beside tensors, from torch's allocator, where it counts as memory of the training."""

from __future__ import annotations

import os
import re

import torch

_THREADS = 2
"""Forwards run in one thread and backwards in another, each with a handle of cuBLAS."""
_KIB = 1 << 10
_HOPPER = 9


def workspace_bytes(device: torch.device) -> int:
    """The bytes of cuBLAS's workspaces on a device.

    Each handle has one of the size that `CUBLAS_WORKSPACE_CONFIG` tells (`:SIZE:COUNT` in KiB, repeated), by default
    32 MiB on Hopper and later and 8 MiB and 128 KiB before (cuBLAS's manual, "cuBLAS API, workspace").

    Args:
        device: Where the training runs.
    """
    if device.type != "cuda":
        return 0
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not pairs:
        is_late = torch.cuda.get_device_properties(device).major >= _HOPPER
        pairs = [(4096, 8)] if is_late else [(4096, 2), (16, 8)]
    return _THREADS * sum(int(size) * int(count) * _KIB for size, count in pairs)
