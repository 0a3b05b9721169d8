"""What a step puts into its batch, writes into it or takes out of it, hooks find so, on every rank as on one device."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "written_batches.py"
WAYS = ("by default", "batches of the first rank", "the loss of the whole batch", "two stages of a rank")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written_batches")
    run_script(SCRIPT, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["dict", "item", "pair"])
def test_hooks_find_it(runs, case, way):
    expected = runs["one_0"][f"{case}, one device"]
    assert len(expected) == 11  # five of validation, two of them before training, and three of each other kind
    for rank in (0, 1):
        found = runs[f"rank_{rank}"][f"{case}, {way}"]
        assert [kind for kind, _ in found] == [kind for kind, _ in expected]
        for (kind, batch), (_, like) in zip(found, expected, strict=True):
            texts, numbers = told(batch)
            assert (kind, texts) == (kind, told(like)[0])
            assert numbers == pytest.approx(told(like)[1], rel=1e-5, abs=1e-5), kind


def told(batch):
    """Its shapes and texts, and its numbers."""
    values = {name: value if isinstance(value, list) else [value] for name, value in batch.items()}
    parts = {f"{name} {index}": part for name, value in values.items() for index, part in enumerate(value)}
    texts = {name: part for name, part in parts.items() if isinstance(part, (str, list))}
    return texts, {name: part for name, part in parts.items() if name not in texts}
