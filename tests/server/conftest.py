import pytest

from lightning_pfo.planner import save_frontier
from tests.server.small_frontier import small_frontier


@pytest.fixture(scope="session")
def frontier():
    return small_frontier()


@pytest.fixture(scope="session")
def frontier_dir(frontier, tmp_path_factory):
    folder = tmp_path_factory.mktemp("frontier")
    save_frontier(frontier, folder)
    return folder
