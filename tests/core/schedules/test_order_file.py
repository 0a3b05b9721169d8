"""A user's own order from a file."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import SCHEDULES, load_schedule, make_schedule, num_ranks_for

OWN = """
# my order
rank 0: 0F0 0F1, 0B0 0B1   # two microbatches
1F0, 1B0, 1F1,, 1B1
"""


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        path = tmp_path / "mine.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_text


def test_an_own_order_is_read(write):
    path = write(OWN)
    schedule = load_schedule(path)
    assert schedule.grid() == "rank 0  0F0  0F1  0B0  0B1\nrank 1  1F0  1B0  1F1  1B1"
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 2, 2)
    assert make_schedule(schedule.name, 2, 2) == make_schedule(str(path), 2, 2, stages_per_rank=1) == schedule
    assert num_ranks_for(schedule.name, 2) == 2


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_drawn_grid_can_be_edited_and_read_back(write, name):
    schedule = make_schedule(name, 3, 6)
    again = load_schedule(write(schedule.grid()))
    assert again.orders == schedule.orders
    assert (again.num_stages, again.num_microbatches) == (schedule.num_stages, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has none"),
        ("# nothing\n\n", "has none"),
        ("0F0 0X0", "line 1: An instruction reads .* got '0X0'"),
        ("0F0 0B0\n1F0 1b0", "line 2: .* got '1b0'"),
        ("0F0 0SEND_F0 0B0", "line 1 has '0SEND_F0'. Use torch's compute_only format"),
        ("rank 1: 0F0 0B0", "is row 0 but says 'rank 1:'"),
        ("0F0 0B0 0B0", "repeats 0B0"),
        ("0F0", "lacks one at stage 0, microbatch 0: it has 0F0"),
        ("0F0 0B0\n2F0 2B0", "lacks one at stage 1, microbatch 0: it has nothing"),
        ("0F99999999999999 0B99999999999999", "lacks one at stage 0, microbatch 0"),
        ("0F" + "9" * 5000, "line 1: "),
        ("0F0 0I0", "lacks one at stage 0"),
        ("0W0 0F0 0I0", "deadlocks: each of 0W0"),
        ("0B0 0F0", r"deadlocks: each of 0B0 .*\(0B0 for 0F0\)"),
        ("0F0\n0B0", "stage 0 on ranks 0 and 1"),
        ("0F0 0B0\nrank 1:", "rank 1 .* has no instructions. Use 1 ranks"),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1", None),
        ("(0F0;0B0)OVERLAP_F_B", None),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_malformed_files(write, text, message):
    if message is None:
        load_schedule(write(text))
        return
    with pytest.raises(ConfigurationError, match=message):
        load_schedule(write(text))


def test_the_offending_cell_is_marked_in_the_grid(write):
    with pytest.raises(ConfigurationError) as caught:
        load_schedule(write("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1 1F1"))
    assert str(caught.value).endswith("rank 0  0F0  0F1  0B0  0B1\nrank 1  1F0 [1F1] 1B0  1B1 [1F1]")


def test_a_file_for_another_pipeline_is_refused(write, tmp_path):
    path = write(OWN)
    with pytest.raises(ConfigurationError, match=r"num_microbatches=4 contradicts .* order for 2 microbatches on 2 "):
        make_schedule(f"file:{path}", 2, 4)
    with pytest.raises(ConfigurationError, match=r"stages_per_rank=2 contradicts .* 2 ranks of 1 stage"):
        make_schedule(f"file:{path}", 2, 2, stages_per_rank=2)
    with pytest.raises(ConfigurationError, match="stages_per_rank=0 contradicts"):
        num_ranks_for(f"file:{path}", 2, stages_per_rank=0)
    for missing in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            make_schedule(f"file:{missing}", 2, 2)


@given(st.text(alphabet='0123FBIW ,;()#\n"rank:', max_size=60))
def test_any_text_is_an_order_or_a_clear_error(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_text(text)
    with suppress(ConfigurationError):
        load_schedule(path).validate()


@pytest.mark.parametrize("digits", [10, 5000])
def test_a_rank_of_many_digits_is_a_clear_error(write, digits):
    with pytest.raises(ConfigurationError, match="An instruction reads") as error:
        load_schedule(write(f"rank {'1' * digits}: 0F0 0B0"))
    assert len(str(error.value)) < 1000


def test_a_path_that_is_none_is_a_clear_error():
    with pytest.raises(ConfigurationError, match="cannot be read"):
        make_schedule("file:a\0b", 2, 2)
