"""Hugging Face models split in stages: equal to the whole model, stage by stage in one process and in Trainer runs."""

import json
from pathlib import Path

import pytest
import torch

from lightning_pfo.strategy.model.units import find_units
from tests.launch import run_script
from tests.strategy.model.stages import Holder, Stages

families = pytest.importorskip("tests.strategy.families", reason="needs transformers, which the dev extra installs")


SCRIPT = Path(__file__).parents[1] / "scripts" / "huggingface.py"


@pytest.mark.parametrize(
    ("family", "padded"), [*((family, True) for family in families.FAMILIES), ("llama", False), ("bert", False)]
)
def test_a_split_model_computes_what_the_whole_one_does(family, padded):
    model = families.make(family)
    num_layers = len(find_units(Holder(model)).layers)
    boundaries = (0, 1, 2, num_layers) if padded else (0, num_layers // 2, num_layers)
    kwargs = families.inputs(family, padded=padded)
    expected = model(**kwargs)
    key = "last_hidden_state" if family == "t5_decoder" else "logits"

    def step(owner):
        output = owner.model(**kwargs)
        return output if "loss" in output else {"loss": output[key].square().mean(), key: output[key]}

    stages = Stages(Holder(model), step, boundaries)
    output = stages.run()
    assert type(output) is (type(expected) if "loss" in expected else dict)
    torch.testing.assert_close(output[key], expected[key], rtol=0, atol=1e-6)
    (expected[key].square().mean() if family == "t5_decoder" else expected["loss"]).backward()
    if family != "t5_decoder":
        torch.testing.assert_close(output["loss"], expected["loss"], rtol=0, atol=1e-6)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name.removeprefix("model."): gradient for name, gradient in stages.gradients().items()}
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_outputs_of_all_layers_are_those_of_the_whole_model():
    model, kwargs = families.make("gpt2"), families.inputs("gpt2")
    options = {**kwargs, "output_hidden_states": True}
    stages = Stages(Holder(model), lambda owner: owner.model(**options), (0, 2, 4))
    output, expected = stages.run(train=False), model(**options)
    assert len(output.hidden_states) == len(expected.hidden_states) == 5
    for state, wanted in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(state, wanted, rtol=0, atol=1e-6)


DEVICES = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("huggingface")
    output = run_script(SCRIPT, folder).stdout
    single = json.loads((folder / "rank_0_of_1.json").read_text())
    ranks = [json.loads((folder / f"rank_{rank}_of_{DEVICES}.json").read_text()) for rank in range(DEVICES)]
    return single, ranks, output


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "opt"])
def test_training_is_that_of_one_device(runs, family):
    single, ranks = runs[0][family], [rank[family] for rank in runs[1]]
    for seen in ranks:
        assert seen["losses"] == pytest.approx(single["losses"], abs=2e-5)
        assert seen["metrics"] == pytest.approx(single["metrics"], abs=2e-5)
        assert seen["predictions"] == pytest.approx(single["predictions"], abs=2e-3)
    assert single["losses"][-1] < single["losses"][0]


@pytest.mark.slow
def test_embeddings_and_heads_are_held_where_they_are_used_and_tied_ones_stay_tied(runs):
    single, ranks, _ = runs
    # the vocabulary has 40 tokens, and hidden states 16 numbers
    for seen in ranks:
        assert seen["gpt2"]["tied"]
        assert seen["llama"]["all"] == single["llama"]["all"]
    for rank in (0, 2):
        assert ranks[rank]["gpt2"]["head"] == pytest.approx(single["gpt2"]["head"], abs=2e-5)
    assert ranks[1]["gpt2"]["head"] == []
    assert [bool(seen["llama"]["head"]) for seen in ranks] == [False, False, True]
    assert sum(seen["llama"]["held"] for seen in ranks) == single["llama"]["held"]
    assert sum(seen["gpt2"]["held"] for seen in ranks) == single["gpt2"]["held"] + 40 * 16


@pytest.mark.slow
def test_the_partition_is_printed_at_the_start(runs):
    output = runs[2]
    assert "stage 1: layers 1-2" in output  # of GPT-2
    assert output.count("imbalance (heaviest / lightest stage): ") == 5
    assert output.count(" by measured time") == 1  # that of OPT


@pytest.mark.slow
def test_of_a_model_built_on_meta_each_rank_makes_its_part(runs):
    ranks = [rank["meta"] for rank in runs[1]]
    for seen in ranks:
        assert seen["losses"] == ranks[0]["losses"]
        assert seen["losses"][-1] < seen["losses"][0]
        assert seen["held"] < seen["all"] / 2
    assert sum(seen["held"] for seen in ranks) == ranks[0]["all"]


@pytest.mark.slow
def test_a_model_is_the_pipeline_in_a_loop_of_ones_own(runs):
    single, ranks = runs[0]["plain"], [rank["plain"] for rank in runs[1]]
    for seen in ranks:
        assert seen["losses"] == pytest.approx(single["losses"], abs=2e-5)
    assert all(seen["names"] < single["names"] for seen in ranks)
