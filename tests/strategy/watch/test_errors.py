from lightning_pfo.strategy.watch.errors import text_of


def test_ranks_that_raise_the_same_are_told_to_have_raised_the_same():
    """An error that names an object has another address in it on each rank."""
    one, other = (text_of(ValueError(f"not a batch: {object()!r}, 0x1f")) for _ in range(2))
    assert one == other == "ValueError: not a batch: <object object at 0x...>, 0x1f"
    assert text_of(KeyboardInterrupt()) == "KeyboardInterrupt"
