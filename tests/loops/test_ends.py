"""A rank of a loop that ends is named by the others, which end too."""

import json
import re
from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parent / "scripts" / "ends.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    run_script(SCRIPT, folder)
    return folder


@pytest.mark.parametrize(
    ("way", "survivor", "kinds", "said"),
    [
        (
            "killed",
            0,
            ["RanksApartError"],
            r"others have ended while .* training number 2\. rank 1 \(pid \d+ on .*ended",
        ),
        ("killed_in_step", 0, ["RankDiedError"], r"^rank 1 \(pid \d+ on .*\) has ended"),
        ("failed", 0, ["RanksApartError"], r"rank 1 \(pid \d+ on .*\) has ended with ValueError: mine\."),
        ("first", 1, ["RanksApartError"], r"rank 0 has ended with ValueError: mine\."),
        ("replica", 2, ["RanksApartError"], r"rank 3 \(pid \d+ on .*\) has ended"),
        *(("replica", rank, ["RankDiedError", "RanksApartError"], r"rank [23] .*has ended") for rank in (0, 1)),
    ],
)
def test_a_rank_that_ends_is_named(folder, way, survivor, kinds, said):
    kind, message = json.loads((folder / f"{way}_{survivor}.json").read_text())
    assert kind in kinds, message
    assert re.search(said, message)
