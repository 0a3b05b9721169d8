"""What is imported is declared in pyproject.toml, what is declared is used, and what is needed is packaged."""

import ast
import re
import sys
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions

import pytest

from tests.launch import ROOT

tomllib = pytest.importorskip("tomllib", reason="reads pyproject.toml with Python's own parser, new in 3.11")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
TOOLS = {"pytest-timeout", "pytest-xdist", "ruff", "mypy", "pandas-stubs", "types-networkx", "aiofiles"}
"""Needed for development, and imported by nobody here."""
OF_AN_EXTRA = {"lightning_pfo/server/web": "server"}
"""Rooms that are imported only by those who have an extra."""
SCRIPTS = [path for folder in ("examples", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
OUR_OWN = {path.stem for path in SCRIPTS} | {"lightning_pfo", "tests"}
"""Scripts import modules beside them."""


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements):
    """Names of the distributions, with those of our own extras."""
    names = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement).groups()
        if name == PROJECT["name"]:
            names |= declared(text for extra in extras.split(",") for text in PROJECT["optional-dependencies"][extra])
        else:
            names.add(normal(name))
    return names


REQUIRED = declared(PROJECT["dependencies"])
EXTRAS = {extra: declared(texts) for extra, texts in PROJECT["optional-dependencies"].items()}


PROVIDERS = packages_distributions()


def providers_of(name):
    """Distributions that a package may come from; what is not installed is taken to be of the same name."""
    return {normal(one) for one in PROVIDERS.get(name, [name])}


def is_for_types_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported(node):
    """Names of the packages that are imported below a node, but for those that only type checkers read."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield node.module.partition(".")[0]
    for child in ast.iter_child_nodes(node) if not is_for_types_only(node) else node.orelse:
        yield from imported(child)


def distributions(folder):
    """Of what the files of a folder import: sets of distributions of which one must be declared."""
    for path in (ROOT / folder).rglob("*.py"):
        for name in sorted(set(imported(ast.parse(path.read_text()))) - sys.stdlib_module_names - OUR_OWN):
            yield path, name, providers_of(name)


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("lightning_pfo", REQUIRED | EXTRAS["zeus"] | EXTRAS["server"]),
        ("examples", REQUIRED | EXTRAS["examples"]),
        ("tests", REQUIRED | EXTRAS["dev"]),
        ("benchmarks", REQUIRED | EXTRAS["dev"] | EXTRAS["benchmarks"]),
    ],
)
def test_what_is_imported_is_declared(folder, allowed):
    undeclared = [f"{path}: {name}" for path, name, providers in distributions(folder) if not providers & allowed]
    assert undeclared == []


def test_what_is_declared_is_used():
    used = {one for _, _, providers in distributions("lightning_pfo") for one in providers}
    assert REQUIRED - used == set()
    everywhere = {
        one
        for folder in ("lightning_pfo", "examples", "tests", "benchmarks")
        for _, _, providers in distributions(folder)
        for one in providers
    }
    assert set.union(*EXTRAS.values()) - everywhere - TOOLS == set()


def test_what_an_extra_brings_is_imported_where_it_is_needed_only():
    optional = set.union(*EXTRAS.values()) - REQUIRED
    for path in (ROOT / "lightning_pfo").rglob("*.py"):
        extra = OF_AN_EXTRA.get(path.parent.relative_to(ROOT).as_posix())
        brought = EXTRAS[extra] if extra else set()
        tree = ast.parse(path.read_text())
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name for node in at_import for name in imported(node)} - {"lightning_pfo"}
        assert set().union(*map(providers_of, names)) & optional <= brought, path


def oldest_python(distribution):
    """The oldest Python that what is installed of a distribution runs on; nothing of one that is not installed."""
    try:
        asked = re.search(r">=(3\.\d+)", metadata(distribution).get("Requires-Python", ""))
    except PackageNotFoundError:
        return None
    return asked and asked.group(1)


def test_pins_are_for_the_pythons_that_have_them():
    """Otherwise nothing can be installed on an older Python, whatever pyproject.toml says."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    oldest = {line: oldest_python(line.partition("==")[0]) for line in pins}
    newer = {line: python for line, python in oldest.items() if python in ("3.11", "3.12", "3.13", "3.14")}
    assert len(newer) > 5
    assert [line for line, python in newer.items() if f'python_version >= "{python}"' not in line] == []


def test_configuration_files_are_packaged_by_their_own_name():
    """Not by the link to them, which a source distribution does not have, nor a wheel that is built from one."""
    wheel = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]
    packed = {"conf": "lightning_pfo/conf", "examples/gpt": "lightning_pfo/examples/gpt"}  # the latter for the demo
    assert wheel["force-include"] == packed
    assert (ROOT / "lightning_pfo" / "conf").is_symlink() <= ("lightning_pfo/conf" in wheel["exclude"])
