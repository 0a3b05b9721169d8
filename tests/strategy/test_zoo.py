"""Models as users bring them train on stages as on one device; benchmarks/model_zoo.py has many more."""

import json
from math import nan
from pathlib import Path

import pytest

from tests.launch import run_script
from tests.strategy.zoo import CASES, matching, runner

pytestmark = pytest.mark.slow

EQUAL = [
    "sequential",
    "large_values",
    "batch_norm",
    "batch_norm_in_both_modes",
    "buffer_in_the_middle",
    "buffers_that_layers_resize",
    "traced_by_fx",
    "multitask",
    "bert_and_head",
    "chain_of_attributes",
    "zipped_lists",
    "residual_loop",
    "lstm_beside_others",
    "unet",
    "text_beside_a_large_encoder",
    "list_that_is_not_called",
    "reversible",
    "tied_embedding_and_head",
    "head_given_the_embedding",
    "loss_with_a_buffer",
    "layers_called_repeatedly",
    "boolean_mask_from_stem",
    "padding_mask_from_embeddings",
    "in_place_relu_first",
    "raw_parameters",
    "activation_checkpointing",
    "experts_by_index",
    "experts_left_out",
    "parts_of_layers_called",
    "weights_that_layers_normalise",
    "complex_values_that_layers_conjugate",
    "flow_run_backward",
    "recurrent_and_contiguous",
    "tokens_packed_by_a_mask",
    "deep_supervision",
    "encode_and_call_twice",
    "vq_vae",
    "asks_parameters",
    "gives_back_weights",
    "takes_a_batch_only",
    "layers_that_limit_weights",
    "layers_that_average_what_they_see",
    "layers_that_cache_angles",
    "layers_that_return_functions",
    "layers_with_shared_layers_in_them",
    "losses_with_centers_and_queues",
    "variables_of_context_and_thread_and_queues",
    "skips_by_a_stack",
    "a_head_that_adapts",
    "switches",
    "calls_functions",
    "hypernetwork",
    "meta_learning",
    "probed",
    "hooks_on_backward",
    "takes_from_its_batch",
    "goes_other_ways",
    "sparse_buffers",
    "inputs_embeds",
    "mixtral",
    "output_attentions",
    "albert",
    "qwen2_moe",
    "perceiver",
    "segformer",
    "vit_mae",
    "clip",
    "siglip",
    "llava",
    "wav2vec2_layerdrop",
    "t5_gated_untied",
    "switch_transformers",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "outcomes.json"
    run_script(Path(__file__).parent / "scripts" / "zoo.py", path, ",".join(EQUAL))
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", EQUAL)
def test_trains_as_on_one_device(outcomes, name):
    assert outcomes[name]["status"] == "equal", outcomes[name]


def test_what_one_rank_says_is_told_although_others_wait(outcomes):
    failures = outcomes["failures"]
    assert failures["refuse"] == ["refused", "Do something else."]
    assert failures["crash"] == ["crashed", "KeyError: 'key'"]
    assert failures["hang"] == ["too slow", "not done after 2 s"]
    assert failures["none"] == ["none", "none"]


def rank(losses=(2.0, 1.0), held=("a",), moved=("a", "b"), distance=0.0, buffer=0.0, num_held=50):
    return runner.Rank([*losses], num_held, 100, frozenset(held), frozenset(moved), distance, 1.0, (buffer, "mean"))


@pytest.mark.parametrize(
    ("second", "status", "message"),
    [
        (rank(held="b"), "equal", ""),
        (rank(held="b", buffer=0.1), "differs", "buffer mean"),
        (rank(held="b", distance=0.1), "differs", "weights"),
        (rank(held="a"), "differs", "no rank holds b"),
        (rank(held="b", losses=(2.0, 1.1)), "differs", "ranks have different losses"),
    ],
)
def test_what_differs_is_noticed(second, status, message):
    outcome = runner.compare(CASES["sequential"], 2, [2.0, 1.0], [rank(), second], nan)
    assert (outcome.status, outcome.message) == (status, message)
    assert outcome.held_twice == pytest.approx(0)


@pytest.mark.parametrize("losses", [(2.0, 1.0001), (2.0, nan), (2.0,)])
def test_losses_that_differ_are_noticed(losses):
    case = CASES["dropout"]
    ranks = [rank(losses, "a"), rank(losses, "b")]
    outcome = runner.compare(case, 2, [2.0, 1.0], ranks, nan)
    # a model that draws random numbers may have other losses, but not NaN, nor fewer
    assert outcome.status == ("alike" if losses[-1] == 1.0001 else "differs")
    assert runner.compare(CASES["sequential"], 2, [2.0, 1.0], ranks, nan).status == "differs"


def test_cases_are_found_by_name_and_group():
    assert [case.name for case in matching(["t5*", "sequential"])] == ["sequential", "t5", "t5_gated_untied"]
    assert {case.group for case in matching(["timm", "torchvision"])} == {"timm", "torchvision"}
