"""State dicts of a module, parts of which are on other ranks."""

import copy
import io
import operator
import pickle

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.state.placeholders import refuse_saving, refuse_saving_part, unmarked


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
        with pytest.raises(ConfigurationError, match=r"placeholders.*get_state_dict.*gather_module"):
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


def optimizer_of(root):
    optimizer = torch.optim.AdamW(root.requires_grad_(True).parameters())
    refuse_saving_part(optimizer)
    for parameter in root[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("save", [pickle.dumps, lambda state: torch.save(state, io.BytesIO())])
def test_a_part_of_an_optimizers_state_is_not_written(root, save):
    state = optimizer_of(root).state_dict()
    for each in (state, copy.deepcopy(state), {"state": copy.copy(state["state"])}):
        with pytest.raises(ConfigurationError, match=r"one rank's parameters.*model\.full_optimizer_state"):
            save({"optimizer": each})


def test_a_part_of_an_optimizers_state_goes_back_into_it(root):
    optimizer = optimizer_of(root)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(before)
    assert [float(each["step"]) for each in optimizer.state.values()] == [1.0, 1.0]


def test_a_whole_state_of_an_optimizer_is_written(root):
    whole = optimizer_of(root[:1]).state_dict()
    assert pickle.loads(pickle.dumps(whole))["state"].keys() == {0, 1}
    without_state = torch.optim.SGD(root.parameters())
    refuse_saving_part(without_state)
    without_state.step()
    assert pickle.loads(pickle.dumps(without_state.state_dict()))["state"] == {}
