"""State dicts of a module, parts of which are on other ranks."""

import copy
import io
import operator
import pickle

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.state.placeholders import refuse_saving, unmarked


@pytest.fixture
def root():
    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).requires_grad_(False)
    root[1].to("meta")
    refuse_saving(root)
    refuse_saving(root)  # as in a second fit
    return root


@pytest.mark.parametrize("save", [pickle.dumps, lambda state: torch.save(state, io.BytesIO())])
def test_placeholders_are_not_written(root, save):
    for module in (root, root[1], root[1][0], copy.deepcopy(root), pickle.loads(pickle.dumps(root))):
        with pytest.raises(ConfigurationError, match=r"placeholders.*gather_module.*get_state_dict"):
            save({"model": module.state_dict()})
    save(root[0].state_dict())


def test_placeholders_are_not_moved(root):
    for move in (torch.Tensor.cpu, lambda tensor: tensor.to("cpu")):
        with pytest.raises(ConfigurationError, match="placeholders"):
            move(root.state_dict()["1.0.weight"])


@pytest.mark.parametrize(
    "use",
    [
        lambda mine, other: mine.add_(other, alpha=0.1),  # torch says nothing, and does nothing
        lambda mine, other: operator.iadd(mine, other),
        lambda mine, other: mine.copy_(other),
        lambda mine, other: torch._foreach_add_([mine, mine], [mine, other]),
        lambda mine, other: torch._foreach_lerp_([mine], [other], 0.1),
        lambda mine, other: torch.equal(mine, other),
        lambda mine, other: other.numpy(),
        lambda mine, other: other.norm().item(),
    ],
)
def test_values_are_not_taken_from_placeholders(root, use):
    with pytest.raises(ConfigurationError, match=r"placeholders.*whole_parameters"):
        use(torch.ones(2, 2), root.state_dict()["1.0.weight"])


def test_state_dicts_are_copied_and_loaded_as_ever(root):
    state = copy.deepcopy(root.state_dict())
    assert state["1.0.weight"].shape == (2, 2)
    state["0.weight"] = torch.ones(2, 2)
    assert str(root.load_state_dict({name: value.clone() for name, value in state.items()})) == str(
        nn.Linear(2, 2).load_state_dict(nn.Linear(2, 2).state_dict())
    )
    assert root[0].weight.tolist() == [[1, 1], [1, 1]]
    assert type(root[1][0].weight) is nn.Parameter
    assert root.state_dict(keep_vars=True)["1.0.weight"] is root[1][0].weight


def test_what_is_whole_has_no_marks(root):
    with unmarked(root):
        whole = copy.deepcopy(root).to_empty(device="cpu")
    assert not any(module._state_dict_hooks for module in whole.modules())
    torch.save(whole.state_dict(), io.BytesIO())
    with pytest.raises(ConfigurationError):
        torch.save(root.state_dict(), io.BytesIO())
