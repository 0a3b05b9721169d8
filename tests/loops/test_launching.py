"""The ways to start processes, what is refused, and the examples."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, TORCHRUN, of_ranks, run_script
from tests.loops.launching import run_with_accelerate, run_with_torchrun, torchrun

SCRIPTS = Path(__file__).parent / "scripts"


def test_one_process_is_a_pipeline_of_one_stage():
    output = run_script(SCRIPTS / "alone.py").stdout
    assert "on 1 processes" in output
    assert "this process is alone, so the pipeline has one stage. Start several by `torchrun" in output


def test_accelerate_launch_on_cpus_starts_one_process_and_we_say_so():
    result = run_with_accelerate("--cpu", "--num_processes", 2, SCRIPTS / "alone.py", expect_success=False)
    assert result.returncode != 0
    assert "ConfigurationError: `accelerate launch --cpu --num_processes N` starts a single process" in result.stdout
    assert "accelerate launch --cpu --no_python torchrun --nproc_per_node N script.py" in result.stdout


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    run_script(SCRIPTS / "refusals.py", folder)
    return of_ranks(folder, 2)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("other_batches", "BatchError", r"ranks \[1\] received another one than rank 0"),
        ("other_batches_later", "BatchError", r"ranks \[1\] received another one than rank 0"),
        ("other_norm", "ConfigurationError", r"norm_type above 0, or inf; got 0"),
        ("prepared_model", "ConfigurationError", r"Leave the model out of accelerator\.prepare"),
        ("wrapped_in_ddp", "ConfigurationError", r"'module' is wrapped in DistributedDataParallel.*model\.module"),
        ("ddp_around", "ConfigurationError", r"has nothing to average.*data_parallel_size=2"),
        ("pipelined_again", "ConfigurationError", r"on a pipeline already.*release\(\)"),
        ("prepared_again", "ConfigurationError", r"on a pipeline already.*release\(\)"),
        ("text_for_a_switch", "ConfigurationError", r"check_loss is True or False; got 'no'\."),
        (
            "prepared_stream",
            "ConfigurationError",
            r"Those of datasets with an index .* Prepare it after prepare_pipeline",
        ),
        (
            "no_loss",
            "ConfigurationError",
            r"a one-element tensor .* shape \(2, 3\).*call model\(inputs, target\)",
        ),
        (
            "another_order",
            "LeadsBackError",
            r"Stages run one after the other.*'module\.layers\.\d'.*is used after.*an example_batch",
        ),
        ("text_for_microbatches", "ConfigurationError", r"num_microbatches is a whole number.* got '4'\."),
        ("fraction_of_replicas", "ConfigurationError", r"got 1\.0\. Use one of \[1, 2\]"),
        ("text_for_example", "ConfigurationError", r"example_batch=\(x, y\), .* Got 'x'\."),
        ("numbers_for_example", "ConfigurationError", r"one of them has samples.* Got \{'x': 3, 'y': None\}\."),
        ("pickled_accelerator", "ConfigurationError", r"neither pickled nor copied.*accelerator\.save_state\(folder\)"),
        ("copied_accelerator", "ConfigurationError", r"neither pickled nor copied.*the accelerator itself"),
        ("model_saved_whole", "ConfigurationError", r"is not pickled.*gather_module\(\)"),
        ("optimizer_state_of_nobody", "ConfigurationError", r"got \{\} on every rank.*model\.full_optimizer_state"),
        ("optimizer_saved_alone", "ConfigurationError", r"one rank's parameters.*model\.full_optimizer_state"),
        ("gradients_of_a_loss", "ConfigurationError", r"loss\.backward\(\) or accelerator\.backward\(loss\)"),
        ("gradients_of_a_multiple", "ConfigurationError", r"read p\.grad"),
        (
            "penalty_on_gradients",
            "ConfigurationError",
            r"create_graph=True.*differentiated.*in its own forward",
        ),
        ("backward_for_some", "ConfigurationError", r"read p\.grad"),
        ("fp8_layers", "ConfigurationError", r"'fp16'; got 'fp8'.* Use Accelerator\(mixed_precision='bf16'\)"),
        ("loss_apart", "ConfigurationError", r"last, by position, the target.*got Tensor\..*model\.predict\(x\)"),
        ("without_accelerator", "ConfigurationError", r"in this order; got a Net as accelerator"),
        ("scheduler_as_loss", "ConfigurationError", r"got a LambdaLR as loss_fn\. Schedulers.*accelerator\.prepare"),
        ("loader_as_optimizer", "ConfigurationError", r"got a DataLoader as optimizer"),
        pytest.param(
            "without_cpu",
            "ConfigurationError",
            r"2 processes, but this Accelerator counts 1.* Write Accelerator\(cpu=True\)",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate finds the GPUs by itself"),
        ),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(refusals, case, kind, message):
    for rank in refusals:
        assert rank[case][0] in (kind, "StepFailedError")  # the latter quotes what another rank raised
        assert re.search(message, rank[case][1])


def test_what_is_like_the_refused_goes_on(refusals):
    for rank in refusals:
        assert rank["gradients_of_something_else"] == [3.0]
        assert rank["gradients_by_an_input"]
        assert rank["devices"] == ["cpu"]  # of placeholders too, whatever number the device was given with
    assert refusals[0]["optimizer_saved_together"] == 13  # of 14 parameters one is frozen


def test_what_was_gathered_stays_as_it_is(refusals):
    assert refusals[0]["kept_states"] == [True, True, False]


def test_accelerates_own_compiling_is_told_to_have_no_effect(refusals):
    found = [rank["compiled_by_accelerate"] for rank in refusals]
    assert [len([each for each in said if "dynamo" in each]) for said, _ in found] == [1, 0]
    assert re.search(r"EAGER.*layer\.forward = torch\.compile\(layer\.forward, backend='eager'\)", found[0][0][0])
    assert all(num_compiled > 0 for _, num_compiled in found)


def test_an_example_shows_the_order_in_which_layers_are_called(refusals):
    for rank in refusals:
        assert " ms" in rank["order_of_an_example"]  # as they were measured with it


def test_the_accelerate_example_profiles_plans_and_trains(tmp_path):
    # the way that accelerate launch works on CPUs, as our message says
    command = ("--cpu", "--num_processes", 1, "--no_python", sys.executable, TORCHRUN, *torchrun(2))
    output = run_with_accelerate(*command, SCRIPTS / "run_example.py", tmp_path).stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert re.search(r"under the plan: .* J per iteration on NVIDIA .* \(emulated, virtual time\)", output)
    assert output.count("imported: set()") == 2
    assert len(report["losses"]) == 2 * 16
    assert report["energy_j"] > 0
    assert report["time_s"] > 8 * 0.03
    assert {"profile.csv", "plans", "checkpoint"} <= {path.name for path in tmp_path.iterdir()}


def test_the_plain_torch_example_learns_and_saves_the_whole_model(tmp_path):
    script = ROOT / "examples" / "plain_torch" / "train.py"
    output = run_with_torchrun(script, "--output", tmp_path / "weights.pt", "--schedule", "interleaved_1f1b").stdout
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", output))
    assert last < first
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert len(weights) == 2 * 10
    assert not any(tensor.is_meta for tensor in weights.values())
