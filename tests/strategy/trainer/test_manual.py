"""Steps that optimize by themselves train as on one device."""

import functools
from pathlib import Path

import pytest
import torch

from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.launch import of_ranks, run_script
from tests.thorough import mostly

SCRIPT = Path(__file__).parents[1] / "scripts" / "manual.py"
SCHEDULES = ("1f1b", "gpipe", "interleaved")
FIRST = {1: ["Module, 1f1b", "Gan, 1f1b"], 2: ["Module, 1f1b", "Gan, 1f1b", "LogsAfterwards, 1f1b"]}
"""Cases of so many ranks that `make test` runs."""
ON_ONE = [
    *(f"{kind}, 1f1b" for kind in ("TwoOptimizers", "Accumulates", "Toggles", "Generates", "Resumed", "JudgeFirst")),
    *(f"{kind}, 1f1b" for kind in ("Adversarial", "Critics", "Closures", "StepsFirst", "Looks", "OnlyLooks")),
    *(f"{kind}, 1f1b" for kind in ("Switches", "Policy", "Averages", "Clamps", "Targets", "Follows")),
]
ON_TWO = [
    *(f"Module, {schedule}" for schedule in SCHEDULES[1:]),
    *mostly(("JudgeFirst, interleaved",), "Gan, gpipe", "Gan, interleaved"),
    *mostly((), "JudgeFirst, 1f1b", "JudgeFirst, gpipe"),
    *(f"{kind}, 1f1b" for kind in ("TwoOptimizers", "Toggles", "Generates", "TogglesModel", "SetsRates", "TwoLosses")),
    *(f"{kind}, 1f1b" for kind in ("Skips", "Half", "Resumed", "ReusesFake", "Adversarial", "Critics", "BothLosses")),
    *(f"{kind}, 1f1b" for kind in ("LooksAgain", "ThreeOptimizers", "Closures", "StepsFirst", "Looks", "OnlyLooks")),
    *(f"{kind}, 1f1b" for kind in ("Penalised", "Switches", "Gains", "WeightNorm", "Parametrized")),
    *(f"{kind}, 1f1b" for kind in ("Policy", "Averages", "Clamps", "Targets", "Follows", "ReadsLogged")),
    *(f"{kind}, 1f1b" for kind in ("LogsWeights", "Sums", "SpectralNorm", "ParametrizedSpectralNorm")),
    *mostly((), "Policy, gpipe", "Policy, interleaved"),
    *(f"{kind}, gpipe" for kind in ("Accumulates", "Norms", "Whole")),
    *(f"{kind}, memory" for kind in mostly(("Gan",), "Module")),
]
ON_FOUR = [
    *mostly(("TwoOptimizers, interleaved", "ReusesFake, 1f1b", "Critics, 1f1b"), "Toggles, gpipe"),
    *mostly(("JudgeFirst, interleaved",), "TwoOptimizers, 1f1b", "TwoOptimizers, gpipe", "ReusesFake, gpipe"),
    *mostly(("Targets, 1f1b", "Follows, 1f1b"), "Policy, 1f1b", "Clamps, 1f1b"),
    *mostly((), "ReusesFake, interleaved", "Accumulates, 1f1b", "ThreeOptimizers, 1f1b", "Resumed, 1f1b"),
]
FURTHER = {1: ON_ONE, 2: ON_TWO, 4: ON_FOUR}
OF_NUMBERS = [
    *((number, case) for number, cases in FIRST.items() for case in cases),
    *(pytest.param(number, case, marks=pytest.mark.slow) for number, cases in FURTHER.items() for case in cases),
]
REFUSED = {
    "Clips": ["gradients after manual_backward", "clip_grad_norm_(self.parameters(), 1.0)", "self.clip_gradients"],
    "Lbfgs": ["calls its closure several times", "self.optimizers().step(closure=", "another optimizer"],
    "Sam": ["Optimizer calls its closure several times", "with other weights", "self.optimizers().step(closure)"],
    "Backward": ["self.loss(batch).backward()", "Call self.manual_backward(loss)"],
    "Couples": ["No weights of the microbatches explain that", "loss_over='batch'"],
    "AddsUp": ["but a pipeline trains on the mean of its microbatches' losses", "No weights of the microbatches"],
    "Counts": ["In manual optimization, `training_step` must either return a Tensor"],
    "Stale": ["before it changed the weights", "self.manual_backward(self.bce(", "opt_g.step()", "x.detach()"],
    "Gan, profile": ["has several, or calls", "partition='parameters'"],
    "Gan, joins": ["loss_over='batch'", "if batch_idx % 2 == 0"],
    "Decides": ["alike for all microbatches", "step of optimizer 0", "batch_idx"],
    "DecidesByValues": ["alike for all microbatches", "step of optimizer 0", "batch_idx"],
    "DecidesInPhases": ["decides nothing by what layers compute", "if d_loss.item() > 0.1:", "on_train_batch_end"],
    "SumsInPlace": ["finds there what it computed before", "at ", "total += loss.detach()", "total = total + x"],
    "Hides": ["this SGD is none of these", "hidden.step()", "self.optimizers()"],
    "InAHook": ["no graph behind it", "manual.py, line ", "self.manual_backward(loss)", "in training_step"],
    "ByHand": ["sets p.grad by itself", "Call optimizer.zero_grad()"],
}
OTHERS = {1: ["Lbfgs"], 2: REFUSED, 4: ["replicas", "sharded"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each of so many ranks has seen in some cases, which are launched once."""

    @functools.cache
    def run(number, first):
        folder = tmp_path_factory.mktemp(f"manual_{number}")
        cases = FIRST[number] if first else [*FURTHER[number], *OTHERS[number]]
        output = run_script(SCRIPT, folder, number, *cases).stdout
        return [{**seen, "output": output} for seen in of_ranks(folder, number)]

    return lambda number, first=False: run(number, first)


@pytest.mark.parametrize(("number", "case"), OF_NUMBERS)
def test_manual_optimization_trains_like_one_device(runs, number, case):
    ranks = runs(number, case in FIRST.get(number, ()))
    plain = ranks[0][f"{case.split(',')[0]}, plain"]
    adds_up = case.startswith(("TwoLosses", "JudgeFirst", "Norms"))
    assert plain["error"] == ""
    weights = {}
    for seen in (each[case] for each in ranks):
        assert seen["error"] == ""
        assert seen["lr"] == plain["lr"]
        assert seen["step"] == plain["step"]
        for name in ("logged", "outputs"):
            assert len(seen[name]) == len(plain[name])
            for found, expected in zip(seen[name], plain[name], strict=True):
                assert found == pytest.approx(expected, rel=2e-5, abs=2e-5)
        if not adds_up:  # one backward has the sum of both losses
            assert seen["hooks"] == plain["hooks"]
            assert seen["given"] == pytest.approx(plain["given"], rel=1e-3 if "Half" in case else 2e-5)
        weights |= seen["weights"]
    assert set(weights) == set(plain["weights"])
    for name, values in plain["weights"].items():
        assert weights[name] == pytest.approx(values, rel=2e-5, abs=2e-5), name


@pytest.mark.slow
def test_replicas_train_as_by_automatic_optimization(runs):
    ranks = runs(4)
    for seen in ranks:
        manual, automatic = seen["Steps"], seen["Automatic"]
        assert manual["error"] == automatic["error"] == ""
        assert manual["given"] == pytest.approx(automatic["given"], rel=1e-6)
        assert set(manual["weights"]) == set(automatic["weights"])
        for name, values in automatic["weights"].items():
            assert manual["weights"][name] == pytest.approx(values, rel=1e-6), name
    assert ranks[0]["Steps"]["given"] != ranks[2]["Steps"]["given"]
    assert ranks[0]["Steps"]["weights"] == ranks[2]["Steps"]["weights"]


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < OLDEST_FSDP["cpu"], reason="this torch keeps replicas whole")
@pytest.mark.parametrize("kind", ["Steps", "Gan", "Clamps", "ClampsInPlace"])
def test_divided_layers_train_as_whole_ones(runs, kind):
    for seen in runs(4):
        whole, divided = seen[f"{kind}, sharded False"], seen[f"{kind}, sharded zero3"]
        assert whole["error"] == divided["error"] == ""
        assert divided["given"] == pytest.approx(whole["given"], rel=2e-5)
        assert set(divided["weights"]) == set(whole["weights"])
        for name, values in whole["weights"].items():
            assert divided["weights"][name] == pytest.approx(values, rel=2e-5, abs=2e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_once_for_a_batch_is_refused(runs, case):
    for seen in runs(1 if case == "Lbfgs" else 2):  # of several ranks none has all parameters
        for word in REFUSED[case]:
            assert word in seen[case]


@pytest.mark.slow
def test_calls_that_are_made_once_for_a_batch_are_no_numbers(runs):
    assert "strategy.manual" not in runs(2)[0]["output"]


@pytest.mark.parametrize("number", FIRST)
def test_a_first_batch_runs_before_training(runs, number):
    assert "did not run" not in runs(number, first=True)[0]["output"]


@pytest.mark.slow
@pytest.mark.parametrize("number", FURTHER)
def test_of_phases_that_do_not_run_in_one_users_are_told_once(runs, number):
    said = runs(number)[0]["output"].count("as forward only it does not run in one")
    assert said == int(number > 1)  # critics look at what the generator makes after what they have said
