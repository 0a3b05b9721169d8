import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.find import find_pipelined_module
from lightning_pfo.strategy.model.ownership import find_shared_parameters, release_other_parts, remember_split
from lightning_pfo.strategy.model.sequential import StageModule
from lightning_pfo.strategy.model.split import find_split


class Holder(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def tower(n=3):
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(n)])


def test_the_only_sequential_is_found():
    root = Holder(stem=nn.Linear(2, 2), model=tower())
    found = find_pipelined_module(root)
    assert (found.name, found.module, found.is_tower) == ("model", root.model, False)
    assert [site.module for site in found.layers] == list(root.model)


def test_the_sequential_of_the_only_child_that_has_one_is_found():
    root = Holder(metric=nn.Identity(), net=Holder(layers=tower(), norm=nn.LayerNorm(2)))
    assert find_pipelined_module(root).name == "net.layers"


def test_nested_sequentials_do_not_matter():
    root = Holder(model=nn.Sequential(tower(), tower()))
    assert find_pipelined_module(root).name == "model"


def test_a_named_module_is_taken():
    root = Holder(a=tower(), b=Holder(c=tower(5)))
    assert find_pipelined_module(root, "b.c").module is root.b.c


def test_lists_of_layers_are_found_with_what_surrounds_them():
    net = Holder(
        embed=nn.Embedding(2, 2),
        encoder=Holder(layers=nn.ModuleList([Holder(inner=nn.ModuleList([nn.Linear(2, 2)]))]), drop=nn.Dropout()),
        decoder=Holder(layers=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), norm=nn.LayerNorm(2)),
        heads=nn.ModuleDict({"lm": nn.Linear(2, 2)}),
    )
    root = Holder(metric=nn.Identity(), net=net)
    found = find_pipelined_module(root)
    assert (found.name, found.module, found.is_tower) == ("net", net, True)
    assert [site.module for site in found.layers] == [*net.encoder.layers, *net.decoder.layers]
    assert [site.module for site in found.surroundings] == [net.embed, net.decoder.norm, net.heads["lm"]]
    named = find_pipelined_module(root, "net.decoder.layers")
    assert (named.name, named.module) == ("net.decoder", net.decoder)
    assert [site.module for site in named.layers] == list(net.decoder.layers)
    itself = find_pipelined_module(net.decoder)
    assert (itself.name, itself.module, len(itself.layers)) == ("", net.decoder, 2)


@pytest.mark.parametrize(
    ("root", "name", "message"),
    [
        (
            Holder(a=tower(), b=tower(4)),
            None,
            r"more than one.*pipeline_module='a'.*'a' \(3 layers\), 'b' \(4 layers\)",
        ),
        (Holder(a=nn.Linear(1, 1)), None, "no nn.Sequential and no nn.ModuleList.*It contains neither"),
        (
            Holder(a=Holder(b=nn.ModuleList([nn.Identity()])), c=Holder(d=tower())),
            None,
            r"ambiguous.*pipeline_module='a'.*'a.b' \(1 layers\), 'c.d' \(3 layers\)",
        ),
        (Holder(a=tower()), "model", r"'model' is nothing. Candidates: 'a' \(3 layers\)"),
        (Holder(a=tower(), b=nn.Linear(1, 1)), "b", "'b' is a Linear"),
        (Holder(a=tower()), "", "'' is a Holder"),
        (Holder(a=Holder(b=nn.ModuleList())), "a.b", "'a.b' is a ModuleList"),
    ],
)
def test_what_cannot_be_found_is_refused_with_the_candidates(root, name, message):
    with pytest.raises(ConfigurationError, match=message):
        find_pipelined_module(root, name)


def test_stages_in_a_row_compute_what_the_module_does():
    model = tower(5)
    x = torch.randn(4, 2)
    first = StageModule(list(model)[:2], is_first=True, is_last=False)
    middle = StageModule(list(model)[2:3], is_first=False, is_last=False)
    last = StageModule(list(model)[3:], is_first=False, is_last=True)
    first.inputs = [((x[:2],), {}), ((x[2:],), {})]
    output = last(middle(first(torch.tensor([1]))))
    assert torch.equal(output, model(x[2:]))
    assert torch.equal(last.output, output)


def test_what_is_not_a_tensor_cannot_be_sent():
    class ToDict(nn.Module):
        def forward(self, x):
            return {"x": x}

    stage = StageModule([ToDict()], is_first=False, is_last=False)
    with pytest.raises(ConfigurationError, match="layer ToDict returned dict"):
        stage(torch.zeros(1))
    last = StageModule([ToDict()], is_first=False, is_last=True)
    assert torch.is_tensor(last(torch.zeros(1)))
    assert set(last.output) == {"x"}


def test_other_layers_become_placeholders_and_shared_parameters_stay():
    root = Holder(
        stem=nn.Linear(2, 2), model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    )
    root.model[2].weight = root.model[0].weight
    split = find_split(root)
    assert split.num_parameters == [6, 4, 4]
    parts = split.parts((0, 1, 3))
    shared = find_shared_parameters(root, parts)
    assert [id(p) for p in shared] == [id(p) for p in (root.stem.weight, root.stem.bias, root.model[0].weight)]
    names = [name for name, _ in root.named_parameters()]
    remember_split(root.model, (0, 1, 3), [0])
    release_other_parts(parts, [0], shared)
    assert [name for name, _ in root.named_parameters()] == names
    assert {name for name, value in root.state_dict().items() if value.is_meta} == {
        *(
            "model.1.weight",
            "model.1.bias",
            "model.1.running_mean",
            "model.1.running_var",
            "model.1.num_batches_tracked",
        )
    }
    assert root.model[2].weight is root.model[0].weight
    placeholder = root.model[1].weight
    remember_split(root.model, (0, 1, 3), [0])
    release_other_parts(parts, [0], shared)
    assert root.model[1].weight is placeholder
    with pytest.raises(ConfigurationError, match=r"split before with boundaries \[0, 1, 3\].*now \[0, 2, 3\]"):
        remember_split(root.model, (0, 2, 3), [0])


def test_what_is_tied_within_another_stage_stays_tied():
    root = Holder(model=tower(4))
    root.model[3].weight = root.model[2].weight
    names = [name for name, _ in root.named_parameters()]
    parts = find_split(root).parts((0, 2, 4))
    assert find_shared_parameters(root, parts) == []
    release_other_parts(parts, [0], [])
    assert root.model[3].weight.is_meta
    assert root.model[3].weight is root.model[2].weight
    assert [name for name, _ in root.named_parameters()] == names
