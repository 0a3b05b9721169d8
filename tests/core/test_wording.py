from lightning_pfo.core.wording import counted, did_you_mean, pipeline_size


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
