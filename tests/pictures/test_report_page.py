"""The page of a run, and the command that makes it anew."""

import json
import re
from html.parser import HTMLParser

import pytest

from lightning_pfo.cli import main
from lightning_pfo.planner import save_frontier, select_plan, write_profile
from tests.planner.conftest import frontier, profile  # noqa: F401

STATES = ("WarmUp", "Measure", "Plan", "Verify", "Hold")


class Tags(HTMLParser):
    """Which elements a page has, and that they are closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.texts, self.values = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.values += [value for _, value in attributes if value]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def run_dir(tmp_path, frontier):  # noqa: F811
    plan = select_plan(frontier, "no_slowdown")
    report = {
        "device": "NVIDIA <A100> (emulated)",
        "emulated": True,
        "saving_percent": 12.5,
        "saving_interval_percent": [12.0, 13.0],
        "slowdown_percent": 0.0,
        "slowdown_interval_percent": None,
        "lower_bound_saving_percent": 13.0,
        "profiling_iterations": 14,
        "profiling_cost_j": -20.0,
        "profiling_cost_s": 0.5,
        "net_saving_j": 900.0,
        "notes": ["Plan made & applied."],
        "predicted": {
            name: {"iteration_time_s": one.iteration_time_s, "iteration_energy_j": one.iteration_energy_j}
            for name, one in (("baseline", frontier.baseline), ("plan", plan))
        },
        "baseline": {"iteration_time_s": 0.5, "iteration_energy_j": 600.0},
        "plan": {"iteration_time_s": 0.5, "iteration_energy_j": 500.0},
        "steps": [
            {"iteration": n, "state": state, "is_planned": n > 2, "time_s": 0.5, "energy_j": 600.0 - n}
            for n, state in enumerate(STATES)
        ],
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    save_frontier(frontier, tmp_path / "plans")
    write_profile(tmp_path / "profile.csv", frontier.profile.to_frame().to_dict("records"))
    return tmp_path


def test_the_page_tells_all_and_needs_nothing_else(run_dir, capsys):
    assert main(["report", str(run_dir)]) == 0
    assert "report.html" in capsys.readouterr().out.replace("\n", "")
    text = (run_dir / "report.html").read_text()
    tags = Tags(text)
    assert tags.open == []
    said = " ".join(tags.texts)
    for wanted in (
        "NVIDIA <A100> (emulated)",
        "12.50 %",
        "12.00 to 13.00 %",
        "14 iterations",
        "Plan made & applied.",
        "Emulated: ",
    ):
        assert wanted in said
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)  # nothing is fetched
    assert tags.seen.count("polyline") == 2 + 2 + 8  # frontier and bound, two curves of the run, eight valleys
    num_boxes = 2 * 4 * 6 * 2  # top clocks and plan, stages, microbatches, forward and backward
    assert tags.seen.count("rect") == num_boxes
    assert "prefers-color-scheme: dark" in text
    assert all(state in said for state in STATES)


def test_a_run_without_a_plan_says_why(run_dir):
    report = json.loads((run_dir / "report.json").read_text())
    kept = {key: report[key] for key in ("device", "emulated", "steps")} | {"problem": "rank 0: no permission"}
    (run_dir / "report.json").write_text(json.dumps(kept))
    for path in (run_dir / "plans").iterdir():
        path.unlink()
    assert main(["report", f"run_dir={run_dir}"]) == 0
    said = " ".join(Tags((run_dir / "report.html").read_text()).texts)
    assert "No plan was applied: rank 0: no permission" in said
    assert "not known" in said


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_a_folder_without_a_run_is_refused(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert "Give the folder of a run, such as outputs/demo." in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
