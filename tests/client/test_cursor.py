import pytest

from lightning_pfo.client.cursor import RowCursor

ROW = (("forward", 1200), ("forward", 1300), ("backward", 1250), ("backward", 0))
TOP_MHZ = 1410


@pytest.fixture
def requests():
    return []


@pytest.fixture
def cursor(requests):
    return RowCursor(requests.append, TOP_MHZ)


def run(cursor, names):
    for name in names:
        cursor.begin_instruction(name)
        cursor.end_instruction()


def test_the_clock_of_the_next_instruction_is_asked_for_at_the_end_of_the_one_before(cursor, requests):
    cursor.begin(ROW)
    run(cursor, [name for name, _ in ROW])
    assert requests == [1200, 1300, 1250, TOP_MHZ, 1200]  # 0 is no clock; then the next step's first
    assert cursor.is_complete


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (["forward", "backward", "forward"], [1200, 1300, TOP_MHZ]),  # fewer microbatches
        (["forward"] * 5, [1200, 1300, 1250, TOP_MHZ]),  # an evaluation
        ([name for name, _ in ROW] + ["forward"], [1200, 1300, 1250, TOP_MHZ, 1200, TOP_MHZ]),  # one more
    ],
)
def test_what_the_plan_does_not_have_runs_at_the_top_clock_until_the_next_step(cursor, requests, names, asked, caplog):
    for _ in range(2):
        requests.clear()
        cursor.begin(ROW)
        run(cursor, names)
        assert requests == asked
        assert not cursor.is_complete
    assert len(caplog.records) == 1  # said once
    requests.clear()
    cursor.begin(ROW)
    assert requests == [1200]


def test_a_step_that_ends_early_is_not_complete(cursor):
    cursor.begin(ROW)
    run(cursor, ["forward"])
    assert not cursor.is_complete


def test_without_a_plan_nothing_is_asked_for(cursor, requests):
    cursor.begin(())
    run(cursor, ["forward", "backward"])
    assert requests == []
    assert not cursor.is_complete


def test_where_no_clock_can_be_set_none_is_told(caplog):
    cursor = RowCursor(lambda clock_mhz: None, top_mhz=0)
    cursor.begin(ROW)
    run(cursor, ["backward"])
    assert "the rest of the step runs at the GPU's own clocks." in caplog.text
