from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.wording import counted, did_you_mean, pipeline_size, shortened


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


def test_a_long_text_keeps_its_begin_and_its_end():
    assert shortened("a" * 3000) == "a" * 3000
    text = shortened("The rule; got " + "x" * 100_000 + ". Use y.")
    assert text.startswith("The rule; got xxx")
    assert text.endswith("xxx. Use y.")
    assert len(text) < 3100
    assert int(text.partition("(")[2].split()[0]) + text.count("x") == 100_000
    assert len(str(PfoError("x" * 100_000))) < 3100
