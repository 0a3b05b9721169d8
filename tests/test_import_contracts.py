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
    "planner": {"core"},
    "device": {"core"},
    "strategy": {"core"},
    "listeners": {"core", "device", "planner"},
    "callbacks": {"core", "device", "listeners"},
}
"""Rooms whose imports are restricted, and the other rooms they may import."""

MUST_NOT_IMPORT = {
    "planner": {"torch", "lightning", "lightning_utilities", "accelerate", "pynvml"},
    "device": {"torch", "lightning", "lightning_utilities", "accelerate", "hydra"},
    "strategy": {"pynvml", "hydra", "highspy", "pandas"},
    "listeners": {"lightning", "lightning_utilities", "accelerate", "pynvml", "hydra", "highspy"},
    "callbacks": {"pynvml", "hydra", "highspy"},
}
DEVICE_ROOMS = {
    "device.gpu": set(),
    "device.config": set(),
    "device.safety": {"device.gpu"},
    "device.backends": {"device.gpu", "device.safety"},
    "device.clocks": {"device.gpu", "device.safety"},
    "device.energy": {"device.gpu"},
    "device.emulated": {"device.gpu", "device.config"},
    "device.open": {"device.gpu", "device.config", "device.backends", "device.emulated"},
    "device.report": {"device.gpu", "device.backends", "device.clocks"},
}
"""Parts of the device layer, from the bottom up, and the other parts that they may import."""

LISTENER_ROOMS = {
    "listeners.agreement": set(),
    "listeners.device_follower": set(),
    "listeners.emulation": set(),
    "listeners.plan_cursor": set(),
    "listeners.clock_requests": {"listeners.device_follower"},
    "listeners.meters": {"listeners.device_follower"},
    "listeners.frequency_scan": {"listeners.meters"},
    "listeners.gpu_session": {"listeners.agreement", "listeners.device_follower", "listeners.emulation"},
    "listeners.profiling_run": {
        *("listeners.agreement", "listeners.gpu_session"),
        *("listeners.frequency_scan", "listeners.meters"),
    },
    "listeners.planned_run": {
        *("listeners.agreement", "listeners.gpu_session"),
        *("listeners.plan_cursor", "listeners.clock_requests", "listeners.meters"),
    },
}
"""The same for what listens to instructions."""

LISTENERS_MAY_READ = {
    *("lightning_pfo.planner.frontier", "lightning_pfo.planner.frontier_io"),
    *("lightning_pfo.planner.select", "lightning_pfo.planner.profile_csv"),
}
"""Of the planner: its files, never its solvers."""

HYDRA_ALLOWED_IN = {"lightning_pfo.planner.command", "lightning_pfo.hydra_app", "lightning_pfo.cli"}
PYNVML_ALLOWED_IN = {"lightning_pfo.device.backends.nvml"}


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


def part_of(module, parts):
    return next((part for part in parts if f"{module}.".startswith(f"lightning_pfo.{part}.")), None)


@pytest.mark.parametrize("parts", [DEVICE_ROOMS, LISTENER_ROOMS], ids=["device", "listeners"])
def test_parts_of_a_room_import_only_parts_they_may_know(parts):
    (room,) = {part.split(".")[0] for part in parts}
    broken = {
        name: {i for i in imported if room_of(i) == room and part_of(i, parts) not in parts[part] | {part}}
        for name, imported in IMPORTS.items()
        if (part := part_of(name, parts))
    }
    assert {name: imported for name, imported in broken.items() if imported} == {}
    TopologicalSorter(parts).prepare()  # one way only
    faces = {f"lightning_pfo.{room}", "lightning_pfo.device.gpu_command", "lightning_pfo.device.restore_command"}
    assert {name for name in FILES if room_of(name) == room and part_of(name, parts) is None} <= faces


def test_listeners_read_the_planner_s_files_only():
    known = {i for name, imported in IMPORTS.items() if room_of(name) == "listeners" for i in imported}
    assert {i for i in known if room_of(i) == "planner"} <= LISTENERS_MAY_READ


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
