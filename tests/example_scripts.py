"""The examples' modules, imported side by side although their files have the same names."""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]


@cache
def load_example(name):
    """Return `model`, `data`, `train` and whatever else examples/NAME has."""
    folder = ROOT / "examples" / name
    others = sorted({path.stem for path in folder.glob("*.py")} - {"model", "data", "train"})
    stems = ("model", "data", *others, "train")  # each is imported by those after it
    sys.path.insert(0, str(folder))
    try:
        modules = {stem: _load(folder / f"{stem}.py", stem, f"{name}_{stem}") for stem in stems}
    finally:
        sys.path.remove(str(folder))
        for stem in stems:
            sys.modules.pop(stem, None)
    return SimpleNamespace(**modules)


def _load(path, stem, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[stem] = module  # others import them by these names
    spec.loader.exec_module(module)
    return module
