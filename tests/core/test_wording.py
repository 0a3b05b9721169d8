import functools

from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.wording import counted, cut, did_you_mean, listed, pipeline_size, shortened


def test_one_has_no_plural():
    assert [counted(number, "plan") for number in (0, 1, 2)] == ["0 plans", "1 plan", "2 plans"]
    assert [counted(number, "energy", "energies") for number in (1, 2)] == ["1 energy", "2 energies"]
    assert [pipeline_size(*size) for size in ((4, 8), (1, 1))] == [
        "4 stages x 8 microbatches",
        "1 stage x 1 microbatch",
    ]


def test_only_close_names_are_suggested():
    assert did_you_mean("pln", {"plan": 1, "gpu": 2}) == " Did you mean plan?"
    assert did_you_mean("restore", ["plan", "gpu"]) == ""


class Silent:
    def __repr__(self):
        raise RuntimeError


NESTED = functools.reduce(lambda inner, _: [inner], range(100_000), 1)
VALUES = st.recursive(
    st.none() | st.text() | st.binary() | st.integers() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


def check_short(value):
    assert len(shortened(value)) <= 240
    assert "\n" not in shortened(value)


@given(VALUES)
def test_whatever_a_message_repeats_is_short_and_on_one_line(value):
    check_short(value)


def test_large_deep_and_silent_values_are_short_too():
    for value in (10**8000, "x" * 10**6, list(range(10**6)), {i: "y" * 1000 for i in range(1000)}, NESTED, Silent()):
        check_short(value)


def test_short_values_are_written_as_python_does():
    for value in (1.5, "a b", None, [1, 2], (1410, 1395), {"a": 1}, b"x", -3):
        assert shortened(value) == repr(value)
    assert cut("0123456789" * 100, 40).startswith("0123456789")
    assert len(cut("0123456789" * 100, 40)) == 40
    assert listed([1, 2, 3]) == "1, 2, 3"
    assert listed(range(100_000), 2) == "0, 1, ... (100,000 in all)"


def test_a_long_text_keeps_its_begin_and_its_end():
    assert cut("a" * 3000, 3000) == "a" * 3000
    text = cut("The rule; got " + "x" * 100_000 + ". Use y.", 3000)
    assert text.startswith("The rule; got xxx")
    assert text.endswith("xxx. Use y.")
    assert len(text) < 3100
    assert len(str(PfoError("x" * 100_000))) < 3100
