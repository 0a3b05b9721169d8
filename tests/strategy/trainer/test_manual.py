"""Steps that optimize by themselves train as on one device."""

from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "manual.py"
CASES = [
    *(f"{kind}, {schedule}" for kind in ("Module", "TwoOptimizers") for schedule in ("1f1b", "gpipe", "interleaved")),
    *(f"{kind}, {schedule}" for kind in ("Accumulates", "Toggles", "Generates") for schedule in ("1f1b", "gpipe")),
    *(f"{kind}, 1f1b" for kind in ("TogglesModel", "SetsRates", "TwoLosses", "Skips", "Half", "Resumed")),
    *(f"{k}, {s}" for k in ("Gan", "ReusesFake", "JudgeFirst") for s in ("1f1b", "gpipe", "interleaved")),
    *(f"{kind}, 1f1b" for kind in ("Adversarial", "Critics", "BothLosses", "LooksAgain", "ThreeOptimizers")),
    *(f"{kind}, 1f1b" for kind in ("Closures", "StepsFirst")),
    "Norms, gpipe",
    "Module, memory",
    "Gan, memory",
    "Whole, gpipe",
]
REFUSED = {
    "Clips": ["gradients after manual_backward", "clip_grad_norm_(self.parameters(), 1.0)", "self.clip_gradients"],
    "Averages": ["weights after optimizer.step()", "self.average = ", "on_train_batch_end"],
    "Lbfgs": ["calls its closure several times", "self.optimizers().step(closure=", "another optimizer"],
    "Backward": ["self.loss(batch).backward()", "Call self.manual_backward(loss)"],
    "Forgets": ["has returned Tensor without", "Call self.manual_backward(loss), or return None"],
    "Stale": ["before it changed the weights", "self.manual_backward(self.bce(", "opt_g.step()", "x.detach()"],
    "Gan, profile": ["has several, or calls", "partition='parameters'"],
    "Gan, joins": ["loss_over='batch'", "if batch_idx % 2 == 0"],
    "Decides": ["alike for all microbatches", "step of optimizer 0", "batch_idx"],
    "Hides": ["this SGD is none of these", "hidden.step()", "self.optimizers()"],
    "ByHand": ["sets p.grad by itself", "Call optimizer.zero_grad()"],
}


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"manual_{request.param}")
    output = run_script(SCRIPT, folder, request.param, timeout_s=300).stdout
    return [{**seen, "output": output} for seen in of_ranks(folder, request.param)]


@pytest.mark.parametrize("case", CASES)
def test_manual_optimization_trains_like_one_device(ranks, case):
    if case not in ranks[0]:
        pytest.skip("other numbers of ranks have this case")
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


def test_replicas_train_as_by_automatic_optimization(ranks):
    if len(ranks) < 4:
        pytest.skip("two replicas of two stages")
    for seen in ranks:
        manual, automatic = seen["Steps"], seen["Automatic"]
        assert manual["error"] == automatic["error"] == ""
        assert manual["given"] == pytest.approx(automatic["given"], rel=1e-6)
        assert set(manual["weights"]) == set(automatic["weights"])
        for name, values in automatic["weights"].items():
            assert manual["weights"][name] == pytest.approx(values, rel=1e-6), name
    assert ranks[0]["Steps"]["given"] != ranks[2]["Steps"]["given"]
    assert ranks[0]["Steps"]["weights"] == ranks[2]["Steps"]["weights"]


@pytest.mark.parametrize("kind", ["Steps", "Gan", "JudgeFirst"])
def test_divided_layers_train_as_whole_ones(ranks, kind):
    if len(ranks) < 4:
        pytest.skip("two replicas of two stages")
    for seen in ranks:
        whole, divided = seen[f"{kind}, sharded False"], seen[f"{kind}, sharded zero3"]
        assert whole["error"] == divided["error"] == ""
        assert divided["given"] == pytest.approx(whole["given"], rel=2e-5)
        assert set(divided["weights"]) == set(whole["weights"])
        for name, values in whole["weights"].items():
            assert divided["weights"][name] == pytest.approx(values, rel=2e-5, abs=2e-5), name


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_once_for_a_batch_is_refused(ranks, case):
    if case not in ranks[0]:
        pytest.skip("other numbers of ranks have this case")
    for seen in ranks:
        for word in REFUSED[case]:
            assert word in seen[case]


def test_users_are_told_once_that_losses_of_phases_are_not_compared(ranks):
    assert ranks[0]["output"].count("optimizes several times in a batch trains on the means") == 1
