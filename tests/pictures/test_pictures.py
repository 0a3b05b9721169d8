from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from matplotlib.axis import Tick
from matplotlib.image import imread
from matplotlib.quiver import Quiver
from matplotlib.text import Text

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.pictures import frontier as frontier_picture
from lightning_pfo.pictures import profile as profile_picture
from lightning_pfo.pictures import timeline as timeline_picture
from lightning_pfo.pictures.frontier import draw_frontier
from lightning_pfo.pictures.profile import _indistinct_stages, _label, draw_energy_valleys
from lightning_pfo.pictures.timeline import draw_timelines
from lightning_pfo.planner import InstructionProfile, plan_frontier
from tests.planner.problems import with_transfers


def test_pictures_are_written_with_something_on_them(frontier, profile, tmp_path):
    chosen = frontier.timeline(frontier.fastest)
    draw_frontier(frontier, tmp_path / "frontier.png", chosen=frontier.fastest)
    draw_timelines({"Fastest": chosen}, tmp_path / "timeline.png")
    draw_timelines({"a": frontier.timeline(frontier.baseline), "b": chosen}, tmp_path / "both.png", colour="clock")
    draw_energy_valleys(profile, tmp_path / "valleys.png", title="A pipeline")
    for path in tmp_path.iterdir():
        pixels = imread(path)
        assert pixels.shape[1] > 600
        assert pixels.std() > 0.02
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (8, 96)])
def test_small_and_large_pipelines_can_be_drawn(make_profile, tmp_path, num_stages, num_microbatches):
    profile = make_profile([0.02] * num_stages, clocks=(1400,))
    frontier = plan_frontier(profile, num_microbatches=num_microbatches, num_plans=2)
    draw_timelines({"": frontier.timeline(frontier.fastest)}, tmp_path / "timeline.png")
    draw_frontier(frontier, tmp_path / "frontier.png")
    assert imread(tmp_path / "timeline.png").shape[1] < 4000


def test_waits_with_a_clock_of_their_own_are_shaded(make_profile, tmp_path):
    profile = make_profile([0.03, 0.05])
    frontier = plan_frontier(profile, num_microbatches=4, num_plans=2, p2p_blocking_power_w={1400: 90, 800: 60})
    draw_timelines({"a": frontier.timeline(frontier.baseline)}, tmp_path / "without.png")
    draw_timelines({"a": frontier.timeline(frontier.fastest)}, tmp_path / "with.png")
    shade = np.array([0xCB, 0xD5, 0xE0]) / 255
    share = {}
    for path in tmp_path.iterdir():
        share[path.stem] = np.isclose(imread(path)[:, :, :3], shade, atol=2e-3).all(axis=2).mean()
    assert share["with"] > 0.02
    assert share["without"] < 1e-4


def test_transfers_are_arrows_from_the_end_of_one_to_when_the_other_could_start(make_profile, monkeypatch):
    figures = []
    monkeypatch.setattr(timeline_picture, "save_figure", lambda figure, _: figures.append(figure))
    plain = make_profile([0.02, 0.03])
    slow = with_transfers(plain, lambda stage, kind: 0.01 if kind is InstructionType.FORWARD else None)
    for profile, num_microbatches in ((plain, 3), (slow, 3), (slow, 40)):
        frontier = plan_frontier(profile, num_microbatches=num_microbatches, num_plans=2)
        timeline = frontier.timeline(frontier.fastest)
        draw_timelines({"a": timeline}, "picture")
        arrows = figures[-1].findobj(Quiver)
        named = "transfer" in [text.get_text() for text in figures[-1].legends[0].get_texts()]
        assert len(arrows) == named == (profile is slow and num_microbatches == 3)
        if arrows:  # of the three forwards of stage 0; those of stage 1 and the backwards hand over in no time
            forwards = [i for i, inst in enumerate(timeline.schedule.orders[0]) if inst.type.value == "F"]
            ends = [timeline.starts_s[i] + timeline.durations_s[i] for i in forwards]
            assert arrows[0].X.tolist() == pytest.approx(ends)
            assert arrows[0].U.tolist() == pytest.approx([0.01] * 3)
            assert all(arrows[0].V > 0)  # to the rank below


def test_no_text_covers_another_or_leaves_the_picture(make_profile, tmp_path, monkeypatch):
    figures = []
    for module in (frontier_picture, profile_picture, timeline_picture):
        monkeypatch.setattr(module, "save_figure", lambda figure, _: figures.append(figure))
    profile = make_profile([0.02, 0.03, 0.04, 0.05, 0.06])
    frontier = plan_frontier(profile, num_microbatches=8, num_plans=5, p2p_blocking_power_w={1400: 90, 800: 60})
    before, after = frontier.timeline(frontier.baseline), frontier.timeline(frontier.fastest)
    draw_timelines({"Chosen plan (no_slowdown)": after}, "picture", device="NVIDIA A100 SXM (emulated)")
    draw_timelines({"Top clocks, emulated": before, "Plan, emulated": after}, "picture")
    draw_energy_valleys(profile, "picture", title="NVIDIA A100 SXM (emulated)")
    small = plan_frontier(make_profile([0.02]), num_microbatches=1, num_plans=3)
    flat = plan_frontier(make_profile([0.02] * 4, clocks=(1400,)), num_microbatches=4)  # a single plan
    for one, plan in (
        (small, small.fastest),
        (flat, flat.fastest),
        (frontier, frontier.fastest),
        (frontier, frontier.least_energy),
    ):
        draw_frontier(one, "picture", chosen=plan)
    written = []
    for figure in figures:
        figure.draw_without_rendering()
        ticks = {label for tick in figure.findobj(Tick) for label in (tick.label1, tick.label2)}  # some are not drawn
        texts = [text for text in figure.findobj(Text) if text.get_text() and text not in ticks]
        inside = [text for axes in figure.axes for text in axes.texts]
        assert all(text.get_window_extent().y1 <= text.axes.bbox.y1 for text in inside)
        boxes = [text.get_window_extent() for text in texts]
        for (one, box), (other, another) in combinations(zip(texts, boxes, strict=True), 2):
            assert one.get_text() == other.get_text() or not box.overlaps(another), (one, other)
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        written.append([text.get_text() for text in texts])
    assert "waiting at a clock of its own" in written[0]
    assert any("less energy, same time" in text for text in written[1])
    assert any("same energy\nsame time" in text for text in written[3])
    assert figures[-1].axes[0].bbox.width > 0.85 * figures[-1].bbox.width


ODD_NAMES = [
    "X" * 300,
    "two\nlines\tand\x00controls",
    "50 % of A_1 [ lab 3 ] {x} \\frac",
    "\ud800",
    "i" * 300,
    " ",
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_names_of_any_kind_are_drawn_on_one_line_inside_the_picture(make_profile, monkeypatch, name):
    figures = []
    for module in (frontier_picture, profile_picture, timeline_picture):
        monkeypatch.setattr(module, "save_figure", lambda figure, _: figures.append(figure))
    profile = replace(make_profile([0.02, 0.03]), gpus=(name,))
    schedule = replace(make_schedule("1f1b", 2, 4), name=f"file:{name}")
    frontier = plan_frontier(profile, schedule=schedule, num_plans=3)
    draw_frontier(frontier, "picture", chosen=frontier.fastest)
    draw_timelines({f"Chosen plan ({name})": frontier.timeline(frontier.fastest)}, "picture", device=name)
    draw_energy_valleys(profile, "picture")
    for figure in figures:
        figure.draw_without_rendering()
        ticks = {label for tick in figure.findobj(Tick) for label in (tick.label1, tick.label2)}
        texts = [text for text in figure.findobj(Text) if text.get_text() and text not in ticks]
        assert all("\n" not in text.get_text() for text in texts if text not in figure.axes[0].texts)
        assert all(text.get_window_extent().x0 >= 0 for text in texts)
        assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in texts), [t.get_text() for t in texts]


def test_groups_of_stages_have_short_labels():
    assert _label([7]) == "stage 7"
    assert _label([0, 1, 2, 5]) == "stages 0-2, 5"


def test_stages_that_differ_by_noise_share_a_label(make_profile):
    profile = make_profile([0.02, 0.03003, 0.03, 0.025, 0.02997])
    kinds = [InstructionType.FORWARD, InstructionType.BACKWARD]
    assert _indistinct_stages(profile, kinds) == [[0], [1, 2, 4], [3]]
    shorter = profile.of(2, kinds[0])  # as where the scan of one stage has ended earlier
    shorter = InstructionProfile(shorter.clocks_mhz[:2], shorter.times_s[:2], shorter.energies_j[:2])
    other = replace(profile, instructions={**profile.instructions, (2, kinds[0]): shorter})
    assert _indistinct_stages(other, kinds) == [[0], [1, 2, 4], [3]]
