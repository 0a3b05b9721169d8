"""Loops of Accelerate's users: a pipeline of one rank or of two gives what one process gives, or says why not."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.loops.accelerate import check_processes
from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "users.py"
RANKS = ("pipeline_0", "pipeline_1")
NEED_TWO = {"batch_sizes_that_fit_one_rank", "averages_and_a_teacher"}
"""Loops that say what the second rank does."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("users")
    run_script(SCRIPT, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    "loop",
    [
        "two_of_one_accelerator",
        "models_taken_by_a_hook",
        "rolled_back",
        "state_from_the_beginning",
        "averages_and_a_teacher",
        "loaders_prepared_before",
        "gathered_for_metrics",
        "evaluated_in_inference_mode",
        "gathered_and_cut_by_hand",
        "stopped_early",
        "loss_over_items_of_several_batches",
        "outputs_and_attributes",
        "attributes_that_loops_set",
        "another_type_afterwards",
        "local_sgd",
        "accumulated_without_sync",
        "saved_for_others",
        "inputs_with_a_graph",
        "batch_sizes_that_fit",
        "batch_sizes_that_fit_one_rank",
    ],
)
def test_a_loop_gives_what_one_process_gives(seen, loop, rank):
    assert "Error" not in str(seen["alone"][loop])  # which both would say
    check(seen[rank][loop], seen["alone"][loop], loop)


def test_a_pipeline_of_one_gives_what_one_process_gives(seen):
    found, alone = seen["of_one"], seen["alone"]
    assert list(found) == list(alone)
    for loop in found.keys() - NEED_TWO:
        check(found[loop], alone[loop], loop)


@pytest.mark.parametrize("rank", RANKS)
def test_code_between_steps_may_have_the_parameters_of_all_stages(seen, rank):
    found, alone = seen[rank]["whole_parameters"], seen["alone"]["whole_parameters"]
    assert found["absent"], "the rank has all parameters anyway"
    check(found | {"absent": False}, alone, "whole_parameters")


def test_norms_of_one_ranks_gradients_are_named_once_and_that_of_all_is_told(seen):
    """Of torch and by hand; they are parts of the norm over all stages, which is that of one process."""
    alone, *ranks = (seen[name]["norms_of_gradients"] for name in ("alone", *RANKS))
    for name, found in alone.items():
        if name == "whole":
            assert [of_rank["whole"] for of_rank in ranks] == pytest.approx([found] * 2, abs=2e-5)
        elif name == "clips_values":
            assert [of_rank[name]["said"] for of_rank in (alone, *ranks)] == [[]] * 3
        else:
            assert found == {"norms": [pytest.approx(alone["whole"], abs=2e-5)] * 2, "said": []}
            for of_rank in ranks:
                (text,) = of_rank[name]["said"]
                assert re.match(
                    rf"{name} \(.*users_loops\.py, line \d+\).*model\.clip_grad_norm_\(float\('inf'\)\)", text
                )
            own = [of_rank[name]["norms"][0] for of_rank in ranks]
            assert sum(norm**2 for norm in own) ** 0.5 == pytest.approx(alone["whole"], abs=2e-5)
            assert min(own) > 0


def test_optimizers_prepared_twice_or_later_have_one_place_and_whole_states(seen):
    check(seen["pipeline_0"]["prepared_later"], seen["alone"]["prepared_later"], "prepared_later")
    assert [count for count, _ in seen["pipeline_1"]["prepared_later"][::2]] == [1, 1, 1]


def test_the_whole_module_is_that_of_one_process(seen):
    check(seen["pipeline_0"]["gathered_module"], seen["alone"]["gathered_module"], "gathered_module")
    others = seen["pipeline_1"]["gathered_module"]
    check(others, seen["alone"]["gathered_module"] | {"whole": [], "none": True}, "gathered_module")


def test_the_loops_have_something_to_tell(seen):
    alone = seen["alone"]
    assert [size for size, _ in alone["loaders_prepared_before"]["batches"]] == [16, 16, 5]
    assert alone["loaders_prepared_before"]["epochs"] is True
    assert len(alone["gathered_for_metrics"]["texts"]) == alone["gathered_for_metrics"]["number"] == 37
    assert alone["batch_sizes_that_fit"][0] == 8
    assert alone["batch_sizes_that_fit"][2:] == [[[16, 0], [12, 0], [8, 0]], [False] * 3, []]  # nothing is left


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_checkpoints_of_tied_weights_go_to_a_pipeline_and_back(seen, family):
    begun, alone, again = seen["tied_alone"][family]
    assert begun[1] > alone[1] > again[1]  # losses after two steps each
    for rank in (0, 1):
        check(seen[f"tied_pipeline_{rank}"][family], alone, family)
    check(seen["tied_again"][family], again, family)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("outputs_in_training", "OutputError", r"gives the loss alone.*'logits'.*model\.predict\(\*\*batch\)"),
        ("term_over_parameters", "ConfigurationError", r"sum over model\.parameters\(\).*weight_decay"),
        ("items_without_weights", "ConfigurationError", r"4 times as large.*microbatch_weight='sum'"),
        ("items_that_nobody_divides_by", "ConfigurationError", r"on the sum of .*4 times as large.*num_items_in_batch"),
        ("saved_placeholders", "ConfigurationError", r"placeholders.*accelerator\.get_state_dict\(model\)"),
        (
            "averaged_by_hand",
            "ConfigurationError",
            r"loop of your own each rank.*`with model\.whole_parameters\(\):`",
        ),
        (
            "averaged_state",
            "ConfigurationError",
            r"own, `with model\.whole_parameters\(\):` \(of two, `with one",
        ),
        ("tuple_in_training", "OutputError", r"gives the loss alone.*'to_tuple'.*model\.predict\(\*\*batch\)"),
        (
            "saved_on_the_main_process",
            "RanksApartError",
            r"rank 0: save_pretrained \(call it on every rank: it writes on the first one only\); rank 1: collecting",
        ),
        (
            "module_saved_on_the_main_process",
            "RanksApartError",
            r"rank 0: accelerator\.save_model \(call it on every rank: it writes on the first one only\); rank 1: ",
        ),
        ("state_on_the_main_process", "RanksApartError", r"rank 0: collecting the state.*rank 1: .*wait_for_everyone"),
        ("evaluation_on_the_main_process", "RanksApartError", r"rank 0: evaluation .*; rank 1: accelerator\.gather"),
        ("prediction_on_the_main_process", "RanksApartError", r"rank 0: prediction .*; rank 1: begin of an epoch"),
        ("outputs_on_the_main_process", "RanksApartError", r"rank 0: a look at outputs 'logits'; rank 1: evaluation"),
        (
            "evaluation_while_others_wait",
            "RanksApartError",
            r"rank 0: evaluation .*; rank 1: torch\.distributed\.barrier",
        ),
        ("question_of_outputs_in_training", "OutputError", r"Asked for was 'logits'.*model\.predict"),
        ("gathered_values_of_processes", "ConfigurationError", r"ranks \[1\] .* accelerate\.utils"),
        ("summed_values_of_processes", "ConfigurationError", r"accelerator\.reduce counts .* accelerate\.utils"),
        ("other_batches_to_predict", "BatchError", r"ranks \[1\] received another one.*set_seed\(seed\)"),
        ("lbfgs", "ConfigurationError", r"LBFGS searches along one direction of all parameters.*AdamW"),
        (
            "part_of_a_state_for_others",
            "ConfigurationError",
            r"^Ranks without a state take that which rank 0 is given\. This state of an optimizer is that of one",
        ),
        (
            "placeholders_for_others",
            "ConfigurationError",
            r"^Ranks without a state take that which rank 1 is given\. This state dict has placeholders",
        ),
        ("generation", "ConfigurationError", r"model\.gather_module\(\)"),
        ("backward_in_evaluation", "ConfigurationError", r"its loss has no gradients\. Call model\.train\(\)"),
        ("another_backward", "ConfigurationError", r"hands the gradients of a step out once.*loss \+ 3 \* loss"),
        ("copied_model", "ConfigurationError", r"model\.module; gather_module\(\)"),
        ("compiled_afterwards", "ConfigurationError", r"Compile layers of it, before it is prepared: layer\.forward"),
        ("tuple_with_loss", "ConfigurationError", r"a tuple of 2 .*return_dict=True"),
        ("freed_model", "ConfigurationError", r"accelerator\.free_memory\(\)"),
    ],
)
def test_what_cannot_be_the_same_says_why(seen, case, kind, message, rank):
    found_kind, found = seen[rank][case]
    assert found_kind in (kind, "StepFailedError")  # the latter quotes what another rank raised
    assert re.search(message, found, re.DOTALL)


def test_a_rank_that_is_left_alone_says_so(seen):
    kind, message = seen["ended"]
    assert kind == "RanksApartError"
    assert "others have ended while this one comes to: collecting the state of the model" in message


def test_a_process_group_that_is_gone_is_no_single_process():
    accelerator = SimpleNamespace(state=SimpleNamespace(num_processes=2))
    with pytest.raises(ConfigurationError, match=r"counts 2 processes, .* gone, as after accelerator"):
        check_processes(accelerator)
