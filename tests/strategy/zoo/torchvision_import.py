"""torchvision beside a torch without CUDA, whichever wheel it comes from; to be imported before Lightning.

Wheels that were built for CUDA cannot load their operators there. Models of classification need none of them, but the
import of torchvision (Lightning's metrics import it where it is installed) wants to know two.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

if importlib.util.find_spec("torchvision") is not None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # they live as long as this object
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
