import pytest
from matplotlib.image import imread

from lightning_pfo.planner import plan_frontier
from lightning_pfo.planner.frontier_picture import draw_frontier
from lightning_pfo.planner.profile_picture import draw_energy_valleys
from lightning_pfo.planner.timeline_picture import draw_timeline, draw_timelines


def test_pictures_are_written_with_something_on_them(frontier, profile, tmp_path):
    chosen = frontier.timeline(frontier.fastest)
    draw_frontier(frontier, tmp_path / "frontier.png", chosen=frontier.fastest)
    draw_timeline(chosen, tmp_path / "timeline.png", title="Fastest")
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
    draw_timeline(frontier.timeline(frontier.fastest), tmp_path / "timeline.png")
    draw_frontier(frontier, tmp_path / "frontier.png")
    assert imread(tmp_path / "timeline.png").shape[1] < 4000
