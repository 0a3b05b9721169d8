from lightning_pfo.core.wording import counted, pipeline_size


def test_one_has_no_plural():
    assert [counted(number, "plan") for number in (0, 1, 2)] == ["0 plans", "1 plan", "2 plans"]
    assert [counted(number, "energy", "energies") for number in (1, 2)] == ["1 energy", "2 energies"]
    assert [pipeline_size(*size) for size in ((4, 8), (1, 1))] == [
        "4 stages x 8 microbatches",
        "1 stage x 1 microbatch",
    ]
