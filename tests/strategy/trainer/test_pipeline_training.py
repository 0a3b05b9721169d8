"""Real Trainer runs in real processes, compared with one device."""

import json
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

SCRIPTS = Path(__file__).parents[1] / "scripts"
DEVICES = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equality")
    run_script(SCRIPTS / "equality.py", folder)
    return {devices: json.loads((folder / f"{devices}.json").read_text()) for devices in (1, 4)}


def test_the_pipeline_trains_like_one_device(runs):
    """Two epochs: clipping, accumulation, shuffling, a short last batch, parameter groups, a schedule, other layers."""
    single, pipeline = runs[1], runs[4]
    assert len(single["train"]) == 14
    for key in ("train", "val", "lr", "best"):
        assert pipeline[key] == pytest.approx(single[key], abs=2e-5), key
    assert pipeline["step"] == single["step"]
    assert single["train"][-1] < single["train"][0]


def test_metrics_predictions_and_tests_are_those_of_one_device(runs):
    single, pipeline = runs[1], runs[4]
    for name in ("train_f1_step", "train_f1"):  # of the last batch: F1 is not the mean over microbatches
        assert 0 < pipeline["metrics"].pop(name, 0.5) <= 1
        single["metrics"].pop(name, None)
    assert pipeline["metrics"] == pytest.approx(single["metrics"], abs=2e-5)
    assert {"train_loss_step", "train_loss_epoch", "train_accuracy", "batch", "val_loss"} <= set(single["metrics"])
    assert {"train_f1_epoch", "metric_auroc", "metric_accuracy", "val_accuracy"} <= set(single["metrics"])
    assert pipeline["confusion"] == single["confusion"]
    assert pipeline["test"][0] == pytest.approx(single["test"][0], abs=2e-5)
    assert len(pipeline["predictions"]) == 37
    for mine, theirs in zip(pipeline["predictions"], single["predictions"], strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5)


def test_the_checkpoint_is_that_of_one_device(runs):
    single, pipeline = runs[1], runs[4]
    assert pipeline["keys"] == single["keys"]
    assert pipeline["optimizer_ids"] == single["optimizer_ids"]
    for key, weights in single["weights"].items():
        assert pipeline["weights"][key] == pytest.approx(weights, abs=2e-5), key
    assert pipeline["validate_best"][0] == pytest.approx(single["validate_best"][0], abs=2e-5)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenarios")
    run_script(SCRIPTS / "scenarios.py", folder)
    return of_ranks(folder, DEVICES)


def test_events_come_in_the_order_of_the_schedule(ranks):
    for rank, seen in enumerate(ranks):
        begun = [line.split()[1:] for line in seen["events"] if line.startswith("begin")]
        ended = [line.split()[1:] for line in seen["events"] if line.startswith("end")]
        planned = [[inst, str(iteration)] for iteration in range(2) for inst in seen["schedule"][rank]]
        assert begun == ended == planned
        assert seen["schedule"] == ranks[0]["schedule"]


@pytest.mark.parametrize(("samples", "iterations"), [(3, 4), (7, 4), (9, 6)])
def test_listeners_hear_of_no_batch_that_has_fewer_microbatches(ranks, samples, iterations):
    for rank, seen in enumerate(ranks):
        assert seen[f"short_{samples}"]["steps"] == 6
        expected = []
        for iteration in range(iterations):
            begun = [f"begin {instruction} {iteration}" for instruction in seen["schedule"][rank]]
            expected += [f"iteration {iteration}", *begun, f"iteration {iteration} over"]
        assert seen[f"short_{samples}"]["heard"] == expected


def test_nobody_is_given_an_example_to_call_the_split_module_with(ranks):
    for seen in ranks:
        during, after = seen["examples"]
        assert during is None
        assert after is not None


def test_instructions_do_not_overlap_and_lie_within_iterations(ranks):
    for seen in ranks:
        inside = iteration = None
        for line in seen["events"]:
            word, *what = line.split()
            if word == "begin":
                assert inside is None
                assert what[1] == iteration
                inside = what
            elif word == "end":
                assert inside == what
                inside = None
            elif word == "iteration":
                iteration = what[0] if what[1:] == [] else None
        assert iteration is None


def of_iterations(lines):
    """What happens in iterations, without the steps that are traced before their first instruction."""
    inside, found = False, []
    for line in lines:
        inside = inside and not line.startswith("iteration")
        if line.startswith("begin"):
            inside = True
        if inside:
            found.append(line)
    return found


def test_the_last_forward_includes_the_loss(ranks):
    lines = of_iterations(ranks[-1]["events"])
    losses = [index for index, line in enumerate(lines) if line == "loss" and lines[index - 1].startswith("begin")]
    assert len(losses) == 8
    for index in losses:
        assert lines[index - 1].startswith("begin 2F")
        assert lines[index + 1] == lines[index - 1].replace("begin", "end")
    assert not any(line == "loss" for line in of_iterations(ranks[1]["events"]))


def test_ranks_see_the_same_batches_and_random_numbers(ranks):
    first, second = ranks[0]["randomness_first"], ranks[0]["randomness_second"]
    assert len(first["batches"]) == 12
    assert len(set(first["batches"])) == 12
    assert first["losses"] == second["losses"]
    for seen in ranks:
        assert seen["randomness_first"]["batches"] == first["batches"]
        assert seen["randomness_first"]["losses"] == first["losses"]
    # the first rank draws for what it feeds the model, the last for what it computes the loss with
    assert ranks[0]["randomness_first"]["noise"] == ranks[-1]["randomness_first"]["noise"]


def test_workers_of_data_loaders_augment_alike_on_all_ranks(ranks):
    assert len(set(ranks[0]["augmented"])) == 2
    assert [seen["augmented"] for seen in ranks] == [ranks[0]["augmented"]] * DEVICES


def test_batch_norm_sees_each_microbatch_once_or_each_batch(ranks):
    assert [seen["batches_tracked_microbatch"] for seen in ranks] == [[12], [], []]
    assert [seen["batches_tracked_deferred"] for seen in ranks] == [[3], [], []]


@pytest.mark.parametrize("name", ["tuple", "towers", "stem_twice", "contrastive"])
def test_modules_of_other_forms_train_like_one_device(ranks, name):
    """Tuples between layers and a dict at the end; two lists of layers; a part that is called several times."""
    assert ranks[0][f"{name}_losses"] == pytest.approx(ranks[0][f"{name}_expected"], abs=2e-5)


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("never_calls", "ConfigurationError", ["calls none that has parameters", "nn.ParameterList", "let modules"]),
        ("returns_nothing", "InvalidOutputError", ["must return a Tensor, a dict, or None", "got 'nothing'"]),
        ("fails_in_the_loss", "ZeroDivisionError", ["the user's own mistake"]),
        ("fails_in_a_layer", "RuntimeError", ["mat1 and mat2"]),
        ("logs_an_object", "ValueError", ["self.log(object, ", "`object` values cannot be logged"]),
        ("few_layers", "PartitionError", ["2 layers for 3 stages", "Use 2 or fewer"]),
        ("other_batches", "BatchError", ["ranks [1, 2] received another one than rank 0"]),
        ("other_batches_later", "BatchError", ["ranks [1, 2] received another one than rank 0"]),
        ("split_before", "ConfigurationError", ["split before", "Build the model anew"]),
        ("few_microbatches", "ConfigurationError", ["num_microbatches=2 for 3 stages", "num_microbatches=3 or more"]),
        ("other_precision", "ConfigurationError", ["'transformer-engine'", "precision='bf16-mixed'"]),
        ("divided_output", "ConfigurationError", ["got a DTensor", "use_local_output=True"]),
        ("sync_batchnorm", "ConfigurationError", ["sync_batchnorm=True", "nn.GroupNorm"]),
        ("sharded_by_the_user", "ConfigurationError", ["'model.0'", "PfoPipelineStrategy(fully_shard=True)"]),
        ("pruned", "ConfigurationError", ["ModelPruning", "leave the callback out"]),
        ("lbfgs", "ConfigurationError", ["LBFGS", "torch.optim.AdamW"]),
        ("compiled_zero_bubble", "ConfigurationError", ["'zbv'", "schedule='1f1b'"]),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(ranks, case, kind, words):
    kinds = [seen["errors"][case][0] for seen in ranks]
    quoted = ("StepFailedError", "PfoError")  # how other ranks report the error of the rank where it happened
    assert kind in kinds
    assert all(found == kind or found in quoted for found in kinds), kinds
    for seen in ranks:
        for word in words:
            assert word in seen["errors"][case][1]
