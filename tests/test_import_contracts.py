"""Who may know whom (the rooms of the package). Read from the source, so that imports inside functions count too."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_pfo"

MAY_KNOW = {
    "core": set(),
    "planner": {"core", "pictures"},  # its command draws
    "device": {"core"},
    "strategy": {"core"},
    "callbacks": {"core", "device", "planner"},
}
"""Rooms whose imports are restricted, and the other rooms they may import."""

MUST_NOT_IMPORT = {
    "planner": {"torch", "lightning", "lightning_utilities", "accelerate", "pynvml"},
    "device": {"torch", "lightning", "lightning_utilities", "accelerate", "hydra"},
    "strategy": {"pynvml", "hydra", "highspy", "pandas"},
    "callbacks": {"pynvml", "hydra", "highspy"},
}
PLANNER_ROOMS: dict[str, set[str]] = {
    "profile": set(),
    "network": set(),
    "pipeline": {"profile", "network"},
    "relaxation": {"network"},
    "search": {"network", "relaxation"},
    "policies": {"profile", "network", "pipeline"},
    "limits": {"profile", "network", "pipeline"},
    "frontier": {"profile", "pipeline"},
    "plan": {"profile", "network", "pipeline", "relaxation", "search", "policies", "limits", "frontier"},
}
"""Which rooms of the planner a room may import: the way of a profile through it."""
SCHEDULE_FAMILIES = {"one_stage_per_rank", "interleaved", "v_shaped", "envpipe"}
SCHEDULE_FILES: dict[str, set[str]] = {
    "schedule": set(),
    "order_file": set(),
    "one_stage_per_rank": set(),
    "interleaved": set(),
    "v_shaped": set(),
    "envpipe": {"one_stage_per_rank"},
    "registry": SCHEDULE_FAMILIES | {"order_file", "schedule"},
    "p2p": {"schedule"},
    "in_flight": {"schedule"},
    "validation": {"registry", "schedule", "p2p", "in_flight"},
}
HYDRA_ALLOWED_IN = {"lightning_pfo.planner.command", "lightning_pfo.hydra_app", "lightning_pfo.cli"}
PYNVML_ALLOWED_IN = {"lightning_pfo.device.nvml"}


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path, modules):
    """Names of all modules that a file imports; `from package import x` is `package.x` where that is a module."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in modules else base


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py")}
IMPORTS = {name: set(imports_of(path, FILES)) for name, path in FILES.items()}


def room_of(module):
    parts = module.split(".")
    return parts[1] if parts[0] == "lightning_pfo" and len(parts) > 1 else None


def importers_of(library):
    return {name for name, imported in IMPORTS.items() if any(i.split(".")[0] == library for i in imported)}


def test_all_rooms_are_found():
    assert set(MAY_KNOW) <= {room_of(name) for name in FILES}


@pytest.mark.parametrize("room", MAY_KNOW)
def test_rooms_import_only_rooms_they_may_know(room):
    allowed = MAY_KNOW[room] | {room, None}
    broken = {
        name: {i for i in imported if i.startswith("lightning_pfo.") and room_of(i) not in allowed}
        for name, imported in IMPORTS.items()
        if room_of(name) == room
    }
    assert {name: imported for name, imported in broken.items() if imported} == {}


@pytest.mark.parametrize(
    ("package", "rooms"), [("planner", PLANNER_ROOMS), ("core.schedules", SCHEDULE_FILES)], ids=["planner", "schedules"]
)
def test_imports_inside_a_package_point_one_way(package, rooms):
    prefix, broken = f"lightning_pfo.{package}.", {}
    for name, imported in IMPORTS.items():
        room = name.removeprefix(prefix).split(".")[0]
        if name.startswith(prefix) and room in rooms:
            others = {i.removeprefix(prefix).split(".")[0] for i in imported if i.startswith(prefix)}
            broken[name] = others - rooms[room] - {room}
    assert {name: others for name, others in broken.items() if others} == {}


@pytest.mark.parametrize("room", MUST_NOT_IMPORT)
def test_rooms_do_not_import_foreign_libraries(room):
    forbidden = MUST_NOT_IMPORT[room]
    exempt = PYNVML_ALLOWED_IN | HYDRA_ALLOWED_IN
    broken = {
        name: {i for i in imported if i.split(".")[0] in forbidden}
        for name, imported in IMPORTS.items()
        if room_of(name) == room and name not in exempt
    }
    assert {name: imported for name, imported in broken.items() if imported} == {}


def test_core_uses_the_standard_library_only():
    roots = {i.split(".")[0] for name, imported in IMPORTS.items() if room_of(name) == "core" for i in imported}
    assert roots - sys.stdlib_module_names == {"lightning_pfo"}


def test_one_module_imports_pynvml():
    assert importers_of("pynvml") == PYNVML_ALLOWED_IN


def test_hydra_is_met_at_the_edges_only():
    assert importers_of("hydra") <= HYDRA_ALLOWED_IN


def test_callbacks_do_not_name_a_strategy():
    text = "".join(path.read_text() for name, path in FILES.items() if room_of(name) == "callbacks")
    assert "PfoPipelineStrategy" not in text


def test_no_import_cycle():
    graph = {name: {i for i in imported if i in FILES and i != name} for name, imported in IMPORTS.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("lightning_pfo", {"torch", "lightning", "pynvml", "pandas", "highspy", "hydra", "matplotlib"}),
        ("lightning_pfo.core.frequency_plan", {"torch", "lightning", "pynvml", "numpy"}),
        ("lightning_pfo.planner", {"torch", "lightning", "pynvml", "matplotlib", "hydra"}),
        ("lightning_pfo.device", {"torch", "lightning", "hydra", "numpy"}),
    ],
)
def test_importing_a_room_leaves_foreign_libraries_out(module, absent):
    code = f"import sys, {module}; print(*sorted(set({sorted(absent)}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == []
