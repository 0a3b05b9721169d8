from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.earlier import earlier_split, remember_split
from lightning_pfo.strategy.model.calls import layer_calls
from lightning_pfo.strategy.model.ownership import release_others
from lightning_pfo.strategy.model.split import split_units
from lightning_pfo.strategy.model.units import find_units
from tests.strategy.model.stages import Holder


def chain(n=3, width=2):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(n)])


def names(units):
    return [unit.name for unit in units]


def layers_of(root, *args, **kwargs):
    return names(find_units(root, *args, **kwargs).layers)


def split_at(root, boundaries):
    units = find_units(root)
    return split_units(root, units, layer_calls(units, None), boundaries)


def test_the_items_of_a_list_are_layers_and_all_else_are_units():
    root = Holder(stem=nn.Linear(2, 2), model=chain(), head=nn.Linear(2, 2))
    units = find_units(root)
    assert units.name == "model"
    assert names(units.layers) == ["model.0", "model.1", "model.2"]
    assert names(units.all) == ["stem", "model.0", "model.1", "model.2", "head"]
    assert [unit.module for unit in units.layers] == list(root.model)


def test_a_root_that_is_a_list_itself_is_divided():
    assert layers_of(chain()) == ["0", "1", "2"]
    assert find_units(chain()).name == ""


def test_outermost_lists_count_and_lists_of_lists_are_flat():
    root = Holder(net=Holder(blocks=nn.Sequential(*[chain(2) for _ in range(3)]), norm=nn.LayerNorm(2)))
    assert layers_of(root) == ["net.blocks.0", "net.blocks.1", "net.blocks.2"]
    grid = Holder(grid=nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)]))
    assert layers_of(grid) == ["grid.0.0", "grid.0.1", "grid.1.0", "grid.1.1"]


class Experts(nn.ModuleDict):
    """A list that is called: whoever does so need not come to its items."""

    def forward(self, rows):
        return sum(self[f"{index}"](rows) for index in rows.int().flatten().unique().tolist())


def test_a_list_with_a_forward_of_its_own_is_a_unit():
    def experts():
        return Experts({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})

    units = find_units(Holder(beside=experts(), layers=nn.ModuleList([experts(), experts()])), None, 2)
    assert [unit.name for unit in units.all] == ["beside", "layers.0", "layers.1"]
    chain_of_lists = nn.ModuleList([Callable([nn.Linear(2, 2)]), Callable([nn.Linear(2, 2)])])
    assert [unit.name for unit in find_units(Holder(layers=chain_of_lists)).layers] == ["layers.0", "layers.1"]


class Callable(nn.ModuleList):
    def forward(self, rows):
        return self[0](rows)


def test_several_lists_are_divided_together():
    root = Holder(encoder=Holder(layers=chain(2)), decoder=Holder(layers=nn.ModuleList([*chain(3)])))
    units = find_units(root)
    assert units.name == ""
    assert names(units.layers) == [
        *(f"encoder.layers.{n}" for n in range(2)),
        *(f"decoder.layers.{n}" for n in range(3)),
    ]


def test_a_small_list_beside_a_large_one_is_a_unit_of_its_own():
    root = Holder(model=chain(4, width=20), head=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    units = find_units(root)
    assert names(units.layers) == ["model.0", "model.1", "model.2", "model.3"]
    assert names(units.all)[-1] == "head"


def test_layers_much_heavier_than_others_are_divided_by_their_lists():
    heavy = Holder(inner=chain(4, width=10))
    root = Holder(model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), heavy, nn.Linear(3, 3)))
    assert layers_of(root) == ["model.0", "model.1", *(f"model.2.inner.{n}" for n in range(4)), "model.3"]


def test_too_few_layers_are_divided_as_far_as_they_can_be():
    root = Holder(model=nn.Sequential(chain(3), chain(3)))
    assert layers_of(root, at_least=2) == ["model.0", "model.1"]
    assert len(layers_of(root, at_least=4)) >= 4
    assert layers_of(Holder(model=chain(2)), at_least=4) == ["model.0", "model.1"]


def test_what_computes_by_itself_beside_lists_is_a_layer_if_it_is_heavy():
    root = Holder(embed=nn.Embedding(500, 8), lstm=nn.LSTM(8, 30, num_layers=2), layers=chain(3, width=6))
    assert layers_of(root) == ["lstm", "layers.0", "layers.1", "layers.2"]


def test_without_lists_the_parts_of_a_module_are_layers():
    root = Holder(net=Holder(a=nn.Linear(2, 2), act=nn.ReLU(), b=nn.Linear(2, 2), c=nn.Linear(2, 2)))
    units = find_units(root)
    assert names(units.layers) == ["net.a", "net.b", "net.c"]
    assert "net.act" in names(units.all)


def test_a_layer_with_parametrizations_is_one_layer():
    layers = {name: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for name in ("one", "two", "three")}
    assert layers_of(Holder(**layers)) == ["one", "two", "three"]
    assert layers_of(Holder(**layers), at_least=9) == ["one", "two", "three"]
    assert names(find_units(Holder(**layers, model=chain(2, 8))).all) == ["one", "two", "three", "model.0", "model.1"]
    block = nn.TransformerEncoderLayer(8, 2)
    nn.utils.parametrizations.spectral_norm(block.linear1)
    names_of = layers_of(Holder(model=block), at_least=9)
    assert "model.linear1" in names_of
    assert not any("parametrizations" in name for name in names_of)


def test_a_layer_that_is_held_twice_is_one_unit():
    root = Holder(model=chain(3))
    root.model[2] = root.model[0]
    assert layers_of(root) == ["model.0", "model.1"]


def test_a_named_module_or_list_is_taken():
    root = Holder(a=chain(), b=Holder(c=chain(5)))
    assert layers_of(root, "b.c") == [f"b.c.{n}" for n in range(5)]
    assert layers_of(root, "b") == [f"b.c.{n}" for n in range(5)]
    assert layers_of(Holder(net=Holder(a=nn.Linear(2, 2), b=nn.Linear(2, 2))), "net") == ["net.a", "net.b"]


@pytest.mark.parametrize(
    ("root", "name", "message"),
    [
        (
            Holder(a=nn.ReLU()),
            None,
            "Holder has no module with parameters that a step calls and that can be split into stages.*nn.ModuleList",
        ),
        (Holder(a=chain()), "model", "'model' is nothing. Leave it out to divide all, or name one of: 'a'"),
        (Holder(a=chain(), b=nn.Linear(1, 1)), "b", "'b' is a Linear without layers.*one of: 'a'"),
        (Holder(a=Holder(b=nn.ModuleList()), c=nn.Linear(1, 1)), "a.b", "'a.b' is a ModuleList.*nothing has layers"),
    ],
)
def test_what_cannot_be_found_is_refused_with_the_candidates(root, name, message):
    with pytest.raises(ConfigurationError, match=message):
        find_units(root, name, at_least=2)


def test_one_stage_needs_no_layers():
    assert layers_of(Holder(a=nn.ReLU())) == []


def test_parts_of_a_unit_that_somebody_hooks_into_are_units():
    root = Holder(model=nn.Sequential(chain(2), chain(2)))
    assert names(find_units(root).all) == ["model.0", "model.1"]
    handle = root.model[1][0].register_forward_hook(lambda module, args, output: None)
    units = find_units(root)
    assert names(units.all) == ["model.0", "model.1", "model.1.0", "model.1.1"]
    assert [unit.followed_into for unit in units.layers] == [False, True]
    handle.remove()
    assert names(find_units(root).all) == ["model.0", "model.1"]


def test_what_a_stage_does_not_use_becomes_placeholders():
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    root = Holder(stem=nn.Linear(2, 2), model=layers)
    root.model[2].weight = root.model[0].weight
    root.scale = nn.Parameter(torch.ones(1))
    split = split_at(root, (0, 1, 2, 3))
    assert split.held["scale"] == {0, 1, 2}  # there is no trace, so it may be used anywhere
    assert split.held["model.0.weight"] == {0, 2}
    named = [name for name, _ in root.named_parameters()]
    remember_split(root, split, [0])
    release_others(root, split.held, [0])
    assert [name for name, _ in root.named_parameters()] == named
    elsewhere = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert {name for name, value in root.state_dict().items() if value.is_meta} == {f"model.1.{n}" for n in elsewhere}
    assert root.model[2].weight is root.model[0].weight
    placeholder = root.model[1].weight
    remember_split(root, split_at(root, (0, 1, 2, 3)), [0])
    release_others(root, split.held, [0])
    assert root.model[1].weight is placeholder
    with pytest.raises(ConfigurationError, match=r"split before with boundaries \[0, 1, 2, 3\].*now \[0, 2, 3\]"):
        remember_split(root, split_at(root, (0, 2, 3)), [0])


def test_how_a_module_was_split_is_found_where_its_layers_are_found_as_others():
    root = Holder(model=nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))))
    parts = find_units(root, opened=frozenset({"model.0", "model.1", "model.2"}))
    assert parts.layers[0].name == "model.0.0"
    calls = replace(layer_calls(parts, None), undivided=frozenset({2}))
    split = split_units(root, parts, calls, (0, 1, 3))
    remember_split(root, split, [0])
    found = earlier_split(root, find_units(root))
    assert found is not None
    assert found.boundaries == (0, 1, 3)
    assert found.calls.undivided == {2}  # so that the same partition gives the same stages
    assert [unit.name for unit in found.calls.layers] == [unit.name for unit in parts.layers]
    assert earlier_split(root.model[1], find_units(root.model[1])) is None
    taken = Holder(model=nn.Sequential(*root.model[:2], nn.Linear(2, 2)))  # not all that was divided
    assert earlier_split(taken, find_units(taken)) is None


def test_what_is_tied_within_another_stage_stays_tied():
    root = Holder(model=chain(4))
    root.model[3].weight = root.model[2].weight
    named = [name for name, _ in root.named_parameters()]
    split = split_at(root, (0, 2, 4))
    assert all(len(stages) == 1 for stages in split.held.values())
    release_others(root, split.held, [0])
    assert root.model[3].weight.is_meta
    assert root.model[3].weight is root.model[2].weight
    assert [name for name, _ in root.named_parameters()] == named


class Particular(nn.LayerNorm):
    """Raises what it likes for some names that it does not know, as models of diffusers do."""

    def __getattr__(self, name):
        if name in ("update", "compute", "reset"):
            raise KeyError(name)
        return super().__getattr__(name)


def test_modules_are_not_asked_for_names_that_they_do_not_have():
    units = find_units(Holder(stem=Particular(2), layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(2))), None, 2)
    assert [unit.name for unit in units.all] == ["stem", "layers.0", "layers.1"]
