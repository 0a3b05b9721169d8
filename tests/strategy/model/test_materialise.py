import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.calls import layer_calls
from lightning_pfo.strategy.model.materialise import materialise
from lightning_pfo.strategy.model.ownership import release_others
from lightning_pfo.strategy.model.split import split_units
from lightning_pfo.strategy.model.units import find_units
from tests.strategy.model.stages import Holder

CPU = torch.device("cpu")


def make_part(root, boundaries, stages, seed=7):
    units = find_units(root)
    split = split_units(root, units, layer_calls(units, None), boundaries)
    materialise(root, split.held, stages, CPU, seed)
    release_others(root, split.held, stages)
    return root


def held(root):
    return {name for name, tensor in root.state_dict().items() if not tensor.is_meta}


def test_only_what_a_stage_runs_is_made_and_any_split_begins_alike():
    def build():
        with torch.device("meta"):
            return Holder(nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)], nn.BatchNorm1d(3)))

    whole = make_part(build(), (0, 4), [0]).state_dict()
    state = torch.get_rng_state()
    first, last = make_part(build(), (0, 1, 4), [0]), make_part(build(), (0, 1, 4), [1])
    assert torch.equal(torch.get_rng_state(), state)
    assert held(first) == {"model.0.weight", "model.0.bias"}
    assert held(last) == set(whole) - held(first)
    for part in (first, last):
        for name in held(part):
            assert torch.equal(part.state_dict()[name], whole[name]), name
    assert not torch.equal(whole["model.0.weight"], whole["model.1.weight"])
    assert torch.equal(whole["model.3.running_var"], torch.ones(3))
    assert make_part(first, (0, 1, 4), [0]).state_dict()["model.0.weight"] is not None


def test_tied_parameters_are_made_once_and_values_that_are_there_stay():
    with torch.device("meta"):
        root = Holder(nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]))
    root.model[2].weight = root.model[0].weight
    root.model[1] = nn.Linear(3, 3)
    value = root.model[1].weight.clone()
    make_part(root, (0, 1, 3), [1])
    assert root.model[2].weight is root.model[0].weight
    assert not root.model[2].weight.is_meta  # both stages use it
    assert root.model[0].bias.is_meta
    assert torch.equal(root.model[1].weight, value)


def test_what_cannot_initialise_itself_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    with torch.device("meta"):
        root = Holder(nn.Sequential(Scale(), nn.Linear(2, 2)))
    make_part(root, (0, 1, 2), [1])
    with pytest.raises(ConfigurationError, match=r"Scale was created on the meta device.*reset_parameters\(\)"):
        make_part(root, (0, 1, 2), [0])


def test_hugging_face_models_initialise_themselves():
    families = pytest.importorskip("tests.strategy.families", reason="needs transformers, which the dev extra installs")
    with torch.device("meta"):
        root = Holder(families.make("qwen2"))
    whole = families.make("qwen2")
    make_part(root, (0, 2, 4), [1])
    model = root.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert [layer.mlp.up_proj.weight.is_meta for layer in model.model.layers] == [True, True, False, False]
    assert torch.equal(model.model.norm.weight, torch.ones(16))
    assert torch.equal(model.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    made = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    layer = sum(p.numel() * p.element_size() for p in whole.model.layers[0].parameters())
    assert made == 2 * layer + (40 * 16 + 16) * 4
