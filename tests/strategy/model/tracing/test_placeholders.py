"""Parameters and buffers of other ranks: on meta, but in a step where they would be without a pipeline."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing import placeholders
from lightning_pfo.strategy.model.tracing.placeholders import (
    explain_missing_values,
    is_placeholder,
    mark_placeholders,
    placeholders_on,
)
from lightning_pfo.strategy.model.tracing.tracked import follow_units
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.parallel.dtensor import lacks_values
from tests.strategy.model.stages import CPU, Holder, Stages, assert_equal, run_plainly


@pytest.fixture
def absent():
    module = nn.BatchNorm1d(3, device="meta")
    mark_placeholders(module)
    return module


@pytest.fixture(params=["no pipeline yet", "a pipeline", "a pipeline that has gone"])
def resting(request, monkeypatch):
    """What this process has had so far."""
    before = placeholders._resting
    monkeypatch.setattr(placeholders, "_text", placeholders._text)
    monkeypatch.setattr(placeholders, "_home", placeholders._home)
    monkeypatch.setattr(placeholders, "_resting", placeholders._ORDINARY)
    placeholders._follow(placeholders._ORDINARY)
    if request.param != "no pipeline yet":
        explain_missing_values(torch.device("cpu") if request.param == "a pipeline" else None)
    yield
    placeholders._follow(before)


@pytest.mark.parametrize("resting", ["a pipeline"], indirect=True)
def test_pruning_in_a_hook_is_refused_with_what_it_takes(resting):
    layer = nn.Linear(3, 3)
    prune.identity(layer, "weight")
    mark_placeholders(layer.to("meta"))
    with pytest.raises(ConfigurationError, match=r"whole_parameters.*prune\.identity\(.*importance_scores=layer"):
        prune.l1_unstructured(layer, "weight", 0.3)


def test_while_a_step_runs_placeholders_tell_the_device_of_the_rank(absent):
    weight, mean = absent.weight, absent.running_mean
    assert weight.is_meta
    with placeholders_on(CPU):
        for tensor in (weight, mean, weight[:2], mean.view(3, 1)):
            assert tensor.device == CPU
            assert (tensor.is_cpu, tensor.is_meta, tensor.is_cuda, tensor.get_device()) == (True, False, False, -1)
            assert is_placeholder(tensor)
        assert torch.zeros(2, device=weight.device).tolist() == [0, 0]
        assert torch.ones_like(weight).tolist() == weight.new_ones(3).tolist() == [1, 1, 1]
        assert weight.new_full((2,), 2.0).tolist() == [2, 2]
        assert torch.arange(3).to(mean).tolist() == torch.arange(3).type_as(mean).tolist() == [0, 1, 2]
        assert (weight.shape, weight.dtype, weight.numel()) == ((3,), torch.float32, 3)
        with pytest.raises(ConfigurationError, match="reads values of a parameter or buffer that other ranks hold"):
            weight.tolist()  # there are no values
    assert weight.is_meta
    assert mean.device.type == "meta"


def test_what_torch_takes_for_a_bug_of_its_own_is_a_lack_of_values():
    """`torch.linalg.solve` looks at what it has not written there, so that it fails now and then only."""
    said = 'false INTERNAL ASSERT FAILED at "BatchLinearAlgebra.cpp":1613, please report a bug to PyTorch.'
    assert lacks_values(RuntimeError(f"{said} torch.linalg.solve: Argument 521726064 has illegal value."))
    assert not lacks_values(RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"))


def test_contexts_may_be_within_one_another(absent):
    with placeholders_on(CPU):
        with placeholders_on(torch.device("meta")):
            assert absent.weight.is_meta
        assert absent.weight.device == CPU
    assert absent.weight.is_meta


@pytest.mark.usefixtures("resting")
def test_placeholders_are_parameters_and_are_copied_and_saved_as_such(absent):
    assert isinstance(absent.weight, nn.Parameter)
    assert [name for name, _ in absent.named_parameters()] == ["weight", "bias"]
    for tensor in absent.state_dict().values():
        assert is_placeholder(tensor)
        assert not isinstance(tensor, nn.Parameter)
    copied = copy.deepcopy(absent)
    assert copied.weight is not absent.weight
    assert is_placeholder(copied.weight)
    assert isinstance(copied.weight, nn.Parameter)
    with placeholders_on(CPU):
        assert copied.running_mean.device == CPU
    loaded = pickle.loads(pickle.dumps(absent))
    assert type(loaded.weight) is nn.Parameter
    assert type(loaded.running_mean) is torch.Tensor
    assert loaded.weight.is_meta


def test_only_what_lies_on_meta_is_a_placeholder():
    module = nn.Linear(2, 2)
    mark_placeholders(module)
    assert type(module.weight) is nn.Parameter
    assert not is_placeholder(module.weight)


def step(owner):
    """Asks every parameter, of whatever stage, where it lies and of what form it is."""
    x = torch.linspace(-1, 1, 12).view(3, 4)
    shifts = [torch.full((4,), 0.1, device=p.device) + torch.zeros_like(p).sum() for p in owner.parameters()]
    for layer, shift in zip(owner.model, shifts, strict=False):
        x = layer(x + shift.to(owner.head.weight)).type_as(owner.model[0].weight)
    for parameter in owner.model.parameters():
        parameter.requires_grad_(parameter.requires_grad)
    return functional.mse_loss(owner.head(x) + owner.model[1].weight.new_ones(4), x.detach())


def test_steps_may_ask_parameters_of_other_stages_which_do_not_hold_them_therefore():
    torch.manual_seed(0)
    owner = Holder(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), head=nn.Linear(4, 4))
    stages = Stages(copy.deepcopy(owner), step, (0, 1, 2, 3))
    expected = run_plainly(owner, step)
    assert_equal((stages.run(), stages.gradients()), expected)
    held = stages.held()
    assert held[0] == {"model.0.weight", "model.0.bias"}
    assert held[1] == {"model.1.weight", "model.1.bias"}
    assert not held[2] & (held[0] | held[1])


def test_they_are_left_out_of_what_is_put_back_after_a_step(absent):
    with placeholders_on(CPU), untouched(absent):
        absent.eval()
    assert absent.training


@pytest.fixture
def explained():
    explain_missing_values(None)
    yield
    explain_missing_values(torch.device("cpu"))


@pytest.mark.parametrize(
    "use",
    [
        lambda module: module.to("cpu"),
        lambda module: module(torch.ones(2, 3)),
        lambda module: torch.jit.trace(module, torch.ones(2, 3)),
        lambda module: module.weight.tolist(),
        lambda module: module.weight.detach().numpy(),
        lambda module: torch.equal(module.weight, module.weight),
        lambda module: torch.zeros(3).add_(module.weight),
    ],
)
@pytest.mark.usefixtures("explained")
def test_without_a_pipeline_what_needs_their_values_says_how_to_get_them(absent, use):
    with placeholders_on(CPU):
        pass
    with pytest.raises(ConfigurationError, match=r"gather_module\(\) on every rank"):
        use(absent)
    assert absent.half().weight.dtype == torch.float16
    assert copy.deepcopy(absent).weight.is_meta


def test_a_file_of_the_whole_module_is_warned_of(absent, caplog, monkeypatch):
    monkeypatch.setattr(placeholders, "_has_warned", False)
    pickle.dumps(absent)
    copy.deepcopy(absent)
    assert not caplog.records
    torch.save(absent, io.BytesIO())
    assert [record.message.count("gather_module()") for record in caplog.records] == [2]


def test_a_module_with_layers_that_are_followed_is_not_saved_but_copied():
    layer = nn.Linear(2, 2)
    with Patches() as patches:
        follow_units([Unit("layer", layer)], patches)
        for save in (lambda: torch.save(layer, io.BytesIO()), lambda: pickle.dumps(layer)):
            with pytest.raises(ConfigurationError, match=r"is not saved as it is\..*gather_module"):
                save()
        copied = copy.deepcopy(layer)
        nn.init.zeros_(copied.weight)
        assert layer.weight.all()
        assert torch.equal(copied(torch.ones(1, 2))[0], layer.bias)  # it runs itself
        again = copy.deepcopy(copied)
        with patches.set_aside():
            assert "forward" not in vars(copied)
        assert "forward" in vars(copied)
        assert list(inspect.signature(layer.forward).parameters) == ["input"]
    for module in (layer, copied, again):
        assert "forward" not in vars(module)
        torch.save(module, io.BytesIO())


@pytest.mark.parametrize(
    "draw",
    [
        lambda module: nn.init.kaiming_uniform_(module.weight.view(3, 1)),
        lambda module: nn.init.xavier_normal_(module.weight.view(3, 1), gain=2.0),
        lambda module: module.weight.data.normal_(0, 2).exponential_(),
        lambda module: module.bias.add_(torch.randn_like(module.bias)),
        lambda module: torch.bernoulli(module.weight),
        lambda module: module.reset_parameters(),
    ],
)
@pytest.mark.parametrize("resting", ["a pipeline"], indirect=True)
@pytest.mark.usefixtures("resting")
def test_hooks_that_draw_for_layers_of_other_ranks_leave_generators_as_there(absent, draw):
    states = []
    for module in (nn.BatchNorm1d(3), absent):
        torch.manual_seed(0)
        with torch.no_grad():
            draw(module)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("resting", ["a pipeline"], indirect=True)
@pytest.mark.usefixtures("resting")
def test_between_steps_they_say_where_this_rank_computes_and_stay_apart(absent):
    assert absent.weight.device == CPU
    assert absent.weight.is_meta
    assert absent.weight.to(absent.weight.device) is absent.weight.cpu() is absent.weight
    with pytest.raises(ConfigurationError, match="whole_parameters"):
        absent.weight.cpu().numpy()


def test_parametrizations_that_come_later_are_refused_in_our_words(absent, monkeypatch):
    for name in ("_text", "_home", "_resting"):
        monkeypatch.setattr(placeholders, name, getattr(placeholders, name))
    before = placeholders._resting
    explain_missing_values(torch.device("cpu"))
    try:
        with pytest.raises(ConfigurationError, match=r"makes a new parameter of one that other ranks hold.*setup"):
            nn.utils.parametrizations.weight_norm(absent)
        assert nn.Parameter(torch.zeros(2)).detach().tolist() == [0, 0]
        assert is_placeholder(absent.weight.detach())
    finally:
        placeholders._follow(before)
