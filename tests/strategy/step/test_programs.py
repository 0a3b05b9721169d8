from collections import UserDict

import pytest
import torch

from lightning_pfo.strategy.step.programs import signature_of


@pytest.mark.parametrize("make", [lambda x: x, lambda x: [x], lambda x: {"x": x}, lambda x: UserDict(x=x)])
def test_the_signature_tells_shapes_apart_whatever_holds_them(make):
    assert signature_of(make(torch.zeros(2, 3))) == signature_of(make(torch.ones(2, 3)))
    assert signature_of(make(torch.zeros(2, 3))) != signature_of(make(torch.zeros(2, 4)))
    assert signature_of(make(torch.zeros(2, 3))) != signature_of(make(torch.zeros(2, 3, dtype=torch.long)))


def test_the_signature_tells_flags_apart():
    assert signature_of({"flag": True}) != signature_of({"flag": False}) != signature_of({"flag": None})
