"""Private names of other libraries: used in `compat` modules only, listed there, and present in what is installed."""

import ast
import functools
import importlib
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_pfo"
UPSTREAM = {
    "accelerate",
    "lightning",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
    "transformers",
}
NAMERS = {"getattr", "hasattr", "setattr", "delattr", "set"}
"""Functions, and `Patches.set`, that take the name of an attribute."""
EXEMPT = {"_current_frames", "_exit", "_fields", "_run_exitfuncs"}
"""Of `os`, `sys`, named tuples and `atexit`, none of which is upstream here."""


def module_name(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in EXEMPT


def imports_upstream(tree):
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return any(module.split(".")[0] in UPSTREAM for module in modules)


def imported_names(tree):
    """Private modules and members of upstream that a module imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            library, *parts = name.split(".")
            if library in UPSTREAM:
                yield from (part for part in parts if is_private(part))


def is_own(node):
    """Whether it is `self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def own_names(tree):
    """Names that a module defines: functions, classes, variables, attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


def foreign_attributes(tree):
    """Private attributes of objects that are not the module's own."""
    own = set(own_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node.value) and is_private(node.attr):
            if node.attr not in own:
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in NAMERS:
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (text for text in texts if re.fullmatch(r"[a-z_]\w*", text) and is_private(text))


def inherited_names(tree, module):
    """Private names of upstream classes that the module's classes use, set or override."""
    for definition in ast.walk(tree):
        if not isinstance(definition, ast.ClassDef) or not definition.bases:
            continue
        cls = getattr(importlib.import_module(module), definition.name, object)
        bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] in UPSTREAM]
        for node in ast.walk(definition):
            name = ""
            if isinstance(node, ast.Attribute) and is_own(node.value):
                name = node.attr
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = node.name
            if is_private(name) and any(defines(base, name) for base in bases):
                yield name


@functools.cache
def source_of(cls):
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # written in C
        return ""


def defines(cls, name):
    """Whether a class has an attribute, or its source gives one to its objects or reads one that others give."""
    return name in vars(cls) or re.search(rf"\.{name}\b|[\"']{name}[\"']", source_of(cls)) is not None


def private_names(path):
    tree = ast.parse(path.read_text())
    found = {*imported_names(tree), *foreign_attributes(tree)}
    return found | set(inherited_names(tree, module_name(path))) if imports_upstream(tree) else found


FILES = sorted(PACKAGE.rglob("*.py"))
COMPAT = [path for path in FILES if path.name == "compat.py"]
COMPAT += [path for path in FILES if path.parent.name == "compat" and "PRIVATE = " in path.read_text()]
OTHERS = [path for path in FILES if path not in COMPAT]


@pytest.mark.parametrize("path", OTHERS, ids=module_name)
def test_private_names_are_used_in_compat_modules_only(path):
    assert private_names(path) == set()


def test_uses_of_all_kinds_are_seen(tmp_path):
    code = """
    from torch._a import b, _c
    import torch._d
    def f(x):
        x._e = x.y._f()
        getattr(x, "_g")
        patches.set(x, "_h", 1)
        x._own, x.__class__, x["_k"]
    class Own:
        def __init__(self):
            self._own = 1
    """
    tree = ast.parse(inspect.cleandoc(code))
    assert {*imported_names(tree), *foreign_attributes(tree)} == {"_a", "_c", "_d", "_e", "_f", "_g", "_h"}


def test_inherited_private_names_are_seen():
    code = """
    class ModuleWithPlaceholders(Module):
        def _apply(self): self._own, self._buffers, super()._replicate_for_data_parallel()
    """
    tree = ast.parse(inspect.cleandoc(code))
    seen = set(inherited_names(tree, "lightning_pfo.strategy.compat.modules"))
    assert seen == {"_apply", "_buffers", "_replicate_for_data_parallel"}


@pytest.mark.parametrize("path", COMPAT, ids=module_name)
def test_compat_modules_list_what_they_use(path):
    module = importlib.import_module(module_name(path))
    assert {name.rpartition(".")[2] for name in module.PRIVATE if is_private(name.rpartition(".")[2])} <= (
        private_names(path) | constants(path)
    )
    assert private_names(path) <= {part for name in module.PRIVATE for part in name.split(".")}
    assert all(len(reason) > 20 for reason in module.PRIVATE.values())
    seen_in = importlib.import_module(module.__package__).SEEN_IN if path.name != "compat.py" else module.SEEN_IN
    assert re.fullmatch(r"(\w+ [\d.]+( to [\d.]+)?(, )?)+", seen_in)


def constants(path):
    return {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}


def private_upstream():
    return [name for path in COMPAT for name in importlib.import_module(module_name(path)).PRIVATE]


def older_lack(name):
    """Whether older versions may lack a name, and what is installed is one: older than what CI pins."""
    if not any(name in getattr(importlib.import_module(module_name(path)), "OLDER_LACK", ()) for path in COMPAT):
        return False
    library = name.partition(".")[0]
    pinned = re.search(rf"^{library}==([\d.]+)", (PACKAGE.parent / "constraints.txt").read_text(), re.MULTILINE)
    return numbers(version(library)) < numbers(pinned.group(1))


def numbers(text):
    return [int(part) for part in re.findall(r"\d+", text)[:3]]


@pytest.mark.parametrize("name", private_upstream())
def test_private_names_exist_in_what_is_installed(name):
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    if older_lack(name):
        pytest.skip("older versions need not have it")
    parts = name.split(".")
    found = importlib.import_module(parts.pop(0))
    for position, part in enumerate(parts):
        if inspect.ismodule(found) and not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
        elif inspect.isclass(found) and not hasattr(found, part):
            assert position == len(parts) - 1
            assert any(defines(base, part) for base in found.__mro__), f"{found} has no {part}"
        else:
            found = getattr(found, part)
