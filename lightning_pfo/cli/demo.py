"""Show it: a training on emulated GPUs that measures, plans and verifies by itself.

Trains a byte-level GPT on the sources of Python's standard library in four stages; results go to output_dir. Example:

  lightning-pfo demo output_dir=outputs/demo
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import lightning_pfo
from lightning_pfo.core.errors import ConfigurationError

_SCRIPT = Path("examples", "gpt", "train.py")


@dataclass
class Settings:
    """What `lightning-pfo demo` can be told."""

    output_dir: str = field(default="outputs/demo", metadata={"help": "folder of the results", "is_path": True})
    gpu: str = field(default="emulated_a100", metadata={"help": "GPU: emulated_a100, emulated_h100, ..., nvml"})


def run(settings: Settings) -> None:
    """Become the example, which is a script of its own: signals reach it, and its status is the command's.

    Raises:
        ConfigurationError: If the example was not installed.
    """
    overrides = ["plan=auto", f"gpu={settings.gpu}", f"output_dir={settings.output_dir}"]
    command = [sys.executable, str(demo_script()), *overrides]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def demo_script() -> Path:
    """Where the example is: in the package, or in the clone that the package is of.

    Raises:
        ConfigurationError: If it is in neither.
    """
    package = Path(lightning_pfo.__file__).parent
    for folder in (package, package.parent):
        if (folder / _SCRIPT).exists():
            return folder / _SCRIPT
    raise ConfigurationError(
        f"The demo is a script of the package, {_SCRIPT}; it is not in {package}. Install it anew."
    )
