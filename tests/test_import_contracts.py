"""Who may know whom (the rooms of the package). Read from the source, so that imports inside functions count too."""

import ast
import functools
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_pfo"

WORDS = {"core.errors", "core.instruction", "core.wording"}
SCHEDULE = {"core.schedules.schedule"}
FAMILIES = [f"core.schedules.{name}" for name in ("one_stage_per_rank", "interleaved", "v_shaped", "envpipe")]

MAY_KNOW = {
    "core": set(),
    "core.schedules": WORDS,
    "core.schedules.schedule": WORDS,
    "core.schedules.order_file": WORDS,
    **{family: WORDS for family in FAMILIES},
    "core.schedules.envpipe": {*WORDS, "core.schedules.one_stage_per_rank"},
    "core.schedules.registry": {*WORDS, "core.schedules.order_file", *SCHEDULE, *FAMILIES},
    "core.schedules.p2p": {*WORDS, *SCHEDULE},
    "core.schedules.in_flight": {*WORDS, *SCHEDULE},
    "pictures": {"core", "planner"},
    "planner": {"core"},
    "planner.profile": {"core"},
    "planner.network": {"core"},
    "planner.pipeline": {"core", "planner.profile", "planner.network"},
    "planner.relaxation": {"core", "planner.network"},
    "planner.search": {"core", "planner.network", "planner.relaxation"},
    "planner.policies": {
        *("core", "planner.profile", "planner.network", "planner.pipeline"),
        "planner.relaxation",  # Perseus solves the same programme, on its own curves
    },
    "planner.limits": {
        *("core", "planner.profile", "planner.network", "planner.pipeline"),
        *("planner.relaxation", "planner.search"),
    },
    "planner.frontier": {"core", "planner.profile", "planner.pipeline"},
    "planner.settings": {"core", "planner.search.effort", "planner.frontier.select"},
    "planner.found_plans": {"core", "planner.pipeline", "planner.search", "planner.limits"},
    "planner.straggler_plans": {
        *("core", "planner.settings", "planner.profile", "planner.network", "planner.pipeline"),
        *("planner.relaxation", "planner.search", "planner.limits", "planner.frontier", "planner.found_plans"),
    },
    "planner.policy_frontier": {
        *("core", "planner.settings", "planner.profile", "planner.network", "planner.pipeline"),
        *("planner.relaxation", "planner.policies", "planner.limits", "planner.frontier", "planner.straggler_plans"),
    },
    "planner.plan": {
        "core",
        "planner.settings",
        "planner.found_plans",
        "planner.straggler_plans",
        "planner.policy_frontier",
        "planner.profile",
        "planner.network",
        "planner.pipeline",
        "planner.relaxation",
        "planner.search",
        "planner.policies",
        "planner.limits",
        "planner.frontier",
    },
    "planner.comparison": {
        *("core", "planner.settings", "planner.plan", "planner.policy_frontier", "planner.profile", "planner.network"),
        *("planner.pipeline", "planner.relaxation", "planner.policies", "planner.limits", "planner.frontier"),
    },
    "planner.cluster": {
        *("core", "planner.settings", "planner.plan", "planner.policies", "planner.profile", "planner.network"),
        "planner.frontier",
    },
    "planner.adaptive": {
        *("core", "planner.settings", "planner.plan", "planner.profile", "planner.frontier"),
    },
    "planner.adaptive.curves": {"planner.profile"},
    "planner.adaptive.windows": {"core"},
    "planner.adaptive.verification": {"core", "planner.frontier", "planner.adaptive.windows"},
    "device": {"core"},
    "device.gpu": {"core"},
    "device.time": {"core"},
    "device.conf_files": {"core"},
    "device.config": {"core", "device.conf_files"},
    "device.safety": {"core", "device.gpu"},
    "device.backends": {"core", "device.gpu", "device.safety"},
    "device.clocks": {"core", "device.gpu", "device.time", "device.safety"},
    "device.energy": {"core", "device.gpu", "device.time"},
    "device.emulated": {"core", "device.gpu", "device.time", "device.conf_files", "device.config"},
    "device.open": {"core", "device.gpu", "device.config", "device.backends", "device.emulated"},
    "device.report": {"core", "device.gpu", "device.time", "device.backends", "device.clocks"},
    "strategy": {"core"},
    "strategy.trainer": {
        "core",
        "strategy.build",
        "strategy.coupling",
        "strategy.step",
        "strategy.engine",
        "strategy.model",
        "strategy.parallel",
        "strategy.state",
        "strategy.watch",
    },
    "strategy.trainer.callbacks": {"core", "strategy.model", "strategy.trainer.compat"},
    "strategy.trainer.logged": set(),
    "strategy.trainer.manual": {
        *("core", "strategy.step", "strategy.model", "strategy.coupling"),
    },
    "strategy.coupling": {"core", "strategy.model"},
    "strategy.earlier": {"core", "strategy.model"},
    "strategy.fitted_units": {"core", "strategy.step", "strategy.model"},
    "strategy.divide": {
        *("core", "strategy.earlier", "strategy.fitted_units", "strategy.step", "strategy.model"),
    },
    "strategy.build": {
        "core",
        "strategy.divide",
        "strategy.earlier",
        "strategy.step",
        "strategy.engine",
        "strategy.model",
        "strategy.parallel",
        "strategy.state",
        "strategy.watch",
    },
    "strategy.step": {"core", "strategy.engine", "strategy.model", "strategy.parallel"},
    "strategy.step.batches": {"core", "strategy.model.tracing.forms.parts"},
    "strategy.step.whole": {
        *("core", "strategy.engine", "strategy.model", "strategy.parallel"),
        *("strategy.step.programs", "strategy.step.recording", "strategy.step.tracing"),
    },
    "strategy.step.memory": {
        *("core", "strategy.engine", "strategy.model", "strategy.parallel", "strategy.step.batches"),
        *("strategy.step.gradients", "strategy.step.metrics", "strategy.step.programs"),
        *("strategy.step.effects", "strategy.step.recording", "strategy.step.whole"),
    },
    "strategy.step.effects.outward": {"core", "strategy.model", "strategy.step.batches"},
    "strategy.step.effects.layers": {"strategy.model", "strategy.parallel", "strategy.step.batches"},
    "strategy.step.effects": {
        *("core", "strategy.model", "strategy.parallel", "strategy.step.batches", "strategy.step.effects.outward"),
    },
    "strategy.step.metrics": {
        *("strategy.engine", "strategy.model", "strategy.parallel", "strategy.step.batches", "strategy.step.effects"),
    },
    "strategy.step.iterations": {
        *("core", "strategy.engine", "strategy.model", "strategy.parallel"),
        *("strategy.step.effects", "strategy.step.gradients", "strategy.step.outcome", "strategy.step.programs"),
        *("strategy.step.on_stages", "strategy.step.recording", "strategy.step.values"),
        "strategy.step.first_batch.sizes",
    },
    "strategy.step.by_units": {
        *("core", "strategy.engine", "strategy.model", "strategy.parallel", "strategy.step.batches"),
        *("strategy.step.effects", "strategy.step.outcome", "strategy.step.values"),
    },
    "strategy.step.first_batch": {
        *("core", "strategy.engine", "strategy.model", "strategy.parallel", "strategy.step.batches"),
        *("strategy.step.effects", "strategy.step.outcome", "strategy.step.programs", "strategy.step.recording"),
        *(
            "strategy.step.gradients",
            "strategy.step.metrics",
            "strategy.step.on_stages",
            "strategy.step.values",
            "strategy.step.whole",
        ),
    },
    "strategy.step.first_batch.differences": {
        *(
            "strategy.model.tracing",
            "strategy.step.batches",
            "strategy.step.effects",
            "strategy.step.gradients",
        ),
        *("strategy.step.metrics", "strategy.step.outcome", "strategy.step.whole"),
    },
    "strategy.engine": {"core", "strategy.model", "strategy.parallel"},
    "strategy.model": {"core", "strategy.parallel"},
    "strategy.model.reach": {
        *("core", "strategy.model.compat", "strategy.model.tracing", "strategy.model.variables"),
    },
    "strategy.model.tracing": {"core", "strategy.model.units", "strategy.model.variables", "strategy.parallel"},
    "strategy.model.tracing.dividing": {
        *("core", "strategy.model.tracing", "strategy.model.units", "strategy.model.variables"),
    },
    "strategy.model.tracing.noticing": {
        *("strategy.model.tracing", "strategy.model.variables", "strategy.parallel"),
    },
    "strategy.model.tracing.forms": {
        *("core", "strategy.model.tracing", "strategy.model.variables", "strategy.parallel"),
    },
    "strategy.compat": set(),
    "strategy.parallel": {"core"},
    "strategy.state": {"core", "strategy.parallel"},
    "strategy.watch": {"core"},
    "loops": {
        "core",
        "strategy.build",
        "strategy.coupling",
        "strategy.step",
        "strategy.engine",
        "strategy.model",
        "strategy.parallel",
        "strategy.state",
        "strategy.watch",
    },
    # the optimizer alone plans, on the first rank: the others have rows of their own
    "listeners": {
        *("core", "device", "planner.frontier", "planner.profile", "planner.plan", "planner.settings"),
        "planner.adaptive",
    },
    "listeners.agreement": {"core"},
    "listeners.device_follower": {"core"},
    "listeners.emulated": {"core", "device"},
    "listeners.plan_cursor": {"core"},
    "listeners.clock_requests": {"core", "device.time", "listeners.device_follower"},
    "listeners.online_envpipe": {"core", "device.time", "listeners.device_follower"},
    "listeners.meters": {
        "core",
        "device",
        "listeners.device_follower",
        "listeners.profile_row",
        "planner.adaptive.windows",
    },
    "listeners.profile_row": set(),
    "listeners.drift": {"core", "listeners.profile_row"},
    "listeners.frequency_scan": {
        *("core", "device", "planner.profile"),
        *("listeners.agreement", "listeners.meters", "listeners.drift", "listeners.profile_row"),
    },
    "listeners.gpu_session": {
        *("core", "device"),
        *("listeners.agreement", "listeners.device_follower", "listeners.emulated"),
    },
    "listeners.profiling_run": {
        *("core", "device", "planner.profile"),
        *("listeners.agreement", "listeners.gpu_session", "listeners.frequency_scan", "listeners.meters"),
        "listeners.profile_row",
    },
    "listeners.planned_run": {
        *("core", "device", "planner.frontier"),
        *("listeners.agreement", "listeners.gpu_session", "listeners.meters"),
        *("listeners.plan_cursor", "listeners.clock_requests", "listeners.online_envpipe"),
        "planner.adaptive.windows",
    },
    "listeners.optimizer.background": {"core", "listeners.agreement"},
    "listeners.optimizer": {
        *("core", "device", "planner.frontier", "planner.profile", "planner.plan", "planner.settings"),
        *("listeners.agreement", "listeners.gpu_session", "listeners.meters"),
        *("listeners.planned_run", "listeners.profile_row", "planner.adaptive"),
    },
    "listeners.optimizer.choosing": {
        *("core", "planner.frontier", "planner.profile", "planner.plan", "planner.settings"),
        *("planner.adaptive", "listeners.profile_row", "listeners.optimizer.memory"),
    },
    "listeners.optimizer.choosing.objectives": {"core", "planner.frontier"},
    "listeners.optimizer.probe": {"core", "listeners.meters"},
    "listeners.optimizer.replicas": {"core", "device.time", "planner.frontier"},
    "listeners.optimizer.beginning": {
        *("core", "listeners.agreement", "listeners.gpu_session"),
        *("listeners.optimizer.choosing", "listeners.optimizer.memory", "listeners.optimizer.settings"),
        "planner.adaptive.choice",
    },
    "listeners.optimizer.following": {
        *("core", "planner.frontier", "listeners.agreement", "listeners.gpu_session"),
        *("listeners.optimizer.choosing.objectives", "listeners.optimizer.replicas", "listeners.optimizer.verifying"),
    },
    "listeners.optimizer.verifying": {
        *("core", "planner.frontier", "listeners.gpu_session", "listeners.meters", "listeners.planned_run"),
        *("listeners.profile_row", "planner.adaptive"),
        *("listeners.optimizer.memory", "listeners.optimizer.probe", "listeners.optimizer.settings"),
    },
    "listeners.optimizer.ledger": {"core", "listeners.meters"},
    "listeners.optimizer.memory": {"core", "listeners.profile_row"},
    "listeners.optimizer.settings": {
        "core",
        "planner.settings",
        "planner.frontier",
        "listeners.optimizer.choosing.objectives",
    },
    "callbacks": {"core", "device", "listeners", "pictures", "planner.adaptive.windows"},
    "server": {"core", "planner"},
    "server.settings": {"core", "planner"},
    "server.jobs": {"core", "planner"},
    "server.jobs.answers": {"core"},
    "server.jobs.messages": {"core"},
    "server.jobs.store": {"core"},
    "server.build": {"core", "planner", "server.settings", "server.jobs"},
    "server.web": {"core", "server.settings", "server.jobs", "server.build"},
    "client": {"core", "device", "listeners"},
}
"""Rooms whose imports are restricted, and the other rooms or modules that they may import.

A room within a room keeps both rows. Whoever divides a room gives each of its parts a row.
"""
KNOWN_TO_ALL = {"strategy": "strategy.compat", "loops": "strategy.compat"}
"""The rooms that all in a room may know besides."""
MOST_MODULES = 12

MUST_NOT_IMPORT = {
    "planner": {"torch", "lightning", "lightning_utilities", "accelerate", "pynvml", "matplotlib"},
    "planner.frontier": {"highspy"},
    "device": {"torch", "lightning", "lightning_utilities", "accelerate", "hydra"},
    "strategy": {"pynvml", "hydra", "highspy", "pandas"},
    "loops": {"pynvml", "hydra", "highspy", "pandas"},
    "listeners": {"lightning", "lightning_utilities", "accelerate", "pynvml", "hydra", "highspy"},
    "callbacks": {"pynvml", "hydra", "highspy"},
    "server": {"torch", "lightning", "lightning_utilities", "accelerate", "pynvml", "hydra", "matplotlib"},
    "server.jobs": {"fastapi", "starlette", "uvicorn", "pydantic"},
    "client": {"lightning", "lightning_utilities", "accelerate", "pynvml", "hydra", "highspy", "fastapi", "httpx"},
}
HYDRA_ALLOWED_IN = {"experiment.command_line"}
LIGHTNING_ALLOWED_IN = {"strategy.trainer", "callbacks", "experiment"}
PYNVML_ALLOWED_IN = {"lightning_pfo.device.backends.nvml_library"}


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


@functools.cache
def imports_in(name):
    """Not found where tests are collected, which each of several processes does."""
    return set(imports_of(FILES[name], FILES))


ROOMS = {name.partition(".")[2] for name, path in FILES.items() if path.name == "__init__.py"} - {""}
DIVIDED = {room.split(".")[0] for room in MAY_KNOW if "." in room}


def is_in(module, room):
    return f"{module}.".startswith(f"lightning_pfo.{room}.")


def modules_in(room):
    return {name for name in FILES if is_in(name, room)}


def importers_of(library):
    return {name for name in FILES if any(i.split(".")[0] == library for i in imports_in(name))}


def test_all_rooms_are_found():
    assert [room for room in MAY_KNOW if not modules_in(room)] == []


def test_all_parts_of_a_divided_room_have_a_row():
    assert {room for room in ROOMS if room.split(".")[0] in DIVIDED} - set(MAY_KNOW) == set()


@pytest.mark.parametrize("room", MAY_KNOW)
def test_rooms_import_only_rooms_they_may_know(room):
    may_know = {room, *MAY_KNOW[room], KNOWN_TO_ALL.get(room.split(".")[0], room)}
    broken = {
        name: {
            i
            for i in imports_in(name)
            if i.startswith("lightning_pfo.") and not any(is_in(i, known) for known in may_know)
        }
        for name in modules_in(room)
    }
    assert {name: imported for name, imported in broken.items() if imported} == {}


def test_rooms_know_each_other_in_one_direction():
    try:
        TopologicalSorter(MAY_KNOW).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_say_what_is_in_them_and_are_small(room):
    face = f"lightning_pfo.{room}"
    here = {name for name, path in FILES.items() if path.parent == FILES[face].parent} - {face}
    assert len(here) <= MOST_MODULES
    assert ast.get_docstring(ast.parse(FILES[face].read_text()))


@pytest.mark.parametrize("room", MUST_NOT_IMPORT)
def test_rooms_do_not_import_foreign_libraries(room):
    forbidden = MUST_NOT_IMPORT[room]
    exempt = PYNVML_ALLOWED_IN
    broken = {
        name: {i for i in imports_in(name) if i.split(".")[0] in forbidden}
        for name in modules_in(room)
        if name not in exempt
    }
    assert {name: imported for name, imported in broken.items() if imported} == {}


def test_core_uses_the_standard_library_only():
    roots = {i.split(".")[0] for name in modules_in("core") for i in imports_in(name)}
    assert roots - sys.stdlib_module_names == {"lightning_pfo"}


def test_one_module_imports_pynvml():
    assert importers_of("pynvml") == PYNVML_ALLOWED_IN


def test_lightning_is_imported_where_it_is_met_only():
    importers = importers_of("lightning") | importers_of("lightning_utilities") | importers_of("pytorch_lightning")
    assert {name for name in importers if not any(is_in(name, room) for room in LIGHTNING_ALLOWED_IN)} == set()


def test_hydra_is_met_at_the_edges_only():
    assert {name for name in importers_of("hydra") if not any(is_in(name, room) for room in HYDRA_ALLOWED_IN)} == set()


def test_callbacks_do_not_name_a_strategy():
    text = "".join(path.read_text() for name, path in FILES.items() if is_in(name, "callbacks"))
    assert "PfoPipelineStrategy" not in text


def test_no_import_cycle():
    graph = {name: imports_in(name) & FILES.keys() - {name} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


TRAINING = {"lightning", "torchmetrics", "accelerate", "transformers"}


@pytest.mark.parametrize(
    "absent",
    [
        {"lightning_pfo": {"torch", "lightning", "pynvml", "pandas", "highspy", "hydra", "matplotlib"}},
        {"lightning_pfo.core.frequency_plan": {"torch", "lightning", "pynvml", "numpy"}},
        {"lightning_pfo.planner.frontier.frontier_files": {"torch", "highspy", "pandas", "networkx"}},  # for listeners
        {"lightning_pfo.planner": {"torch", "lightning", "pynvml", "matplotlib", "hydra"}},
        {"lightning_pfo.device": {"torch", "lightning", "hydra", "numpy"}},
        # One process, as importing torch takes seconds.
        {
            "lightning_pfo.strategy": {"torch", "lightning"},
            "lightning_pfo.strategy.build": TRAINING,
            "lightning_pfo.loops.plain": TRAINING,
        },
    ],
    ids=lambda absent: [*absent][-1],
)
def test_importing_a_room_leaves_foreign_libraries_out(absent):
    code = "import sys\n" + "".join(
        f"import {module}; print(*sorted(set({sorted(libraries)}) & set(sys.modules)))\n"
        for module, libraries in absent.items()
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=300, check=True
    )
    assert result.stdout.split() == []
