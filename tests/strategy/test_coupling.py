"""Which optimizers treat parameters together is found by trying."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_pfo.strategy.coupling import couples_parameters, needs_other_gradients
from lightning_pfo.strategy.step.memory.optimizer_trial import try_optimizers


class SharpnessAware(torch.optim.Optimizer):
    """Goes uphill by a step of the length of all gradients together first, as SAM does."""

    def __init__(self, parameters, rho=0.05):
        super().__init__(parameters, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        with_gradients = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_gradients]).norm()
        for p in with_gradients:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=0.05 / float(norm))
        with torch.enable_grad():
            closure()
        for p in with_gradients:
            p.copy_(self.state[p]["before"])
        self.base.step()


class OneStepSize(torch.optim.SGD):
    """Estimates its step size from all gradients of the steps before, as Prodigy does."""

    factor = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            group["lr"] = 1e-3 + self.factor
        super().step()
        self.factor += 1e-3 * float(sum(gradient.abs().sum() for gradient in gradients))


class Noisy(torch.optim.SGD):
    """Draws for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(torch.randn_like(p), alpha=0.1)


ALONE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "groups": lambda p: torch.optim.AdamW([{"params": [each], "lr": 0.1} for each in p]),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "noisy": lambda p: Noisy(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


def parameters(device="cpu"):
    return [*nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).to(device).parameters()]


@pytest.mark.parametrize("name", ALONE)
def test_most_optimizers_treat_each_parameter_on_its_own(name):
    optimizer = ALONE[name](parameters())
    before = [p.clone() for group in optimizer.param_groups for p in group["params"]]
    num_states = len(optimizer.state)
    assert not couples_parameters(optimizer)
    assert len(optimizer.state) == num_states
    assert all(map(torch.equal, before, [p for group in optimizer.param_groups for p in group["params"]]))


@pytest.mark.parametrize("make", [SharpnessAware, lambda p: OneStepSize(p, lr=0.1)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_some_treat_parameters_together(make, device):
    optimizer = make(parameters(device))
    assert couples_parameters(optimizer)
    assert not optimizer.state


class Frees(SharpnessAware):
    freed = 0

    def __del__(self):
        Frees.freed += 1


def test_no_copy_is_made_of_what_frees_something_when_it_goes():
    optimizer = Frees(parameters())
    assert not couples_parameters(optimizer)
    assert Frees.freed == 0


def test_schedulers_change_nothing():
    optimizer = SharpnessAware(parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert couples_parameters(optimizer)
    assert not couples_parameters(torch.optim.SGD(parameters(), lr=0.1))


class Uphill(torch.optim.SGD):
    """Calls its closure once, where it has changed something."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(0.1)
        with torch.enable_grad():
            closure()
        super().step()


@pytest.mark.parametrize("make", [SharpnessAware, lambda held: Uphill(held, lr=0.1), torch.optim.LBFGS])
def test_who_needs_gradients_at_other_weights_is_found(make):
    held = parameters()
    before = [p.detach().clone() for p in held]
    assert needs_other_gradients(make(held))
    assert all(map(torch.equal, held, before))


@pytest.mark.parametrize("name", ALONE)
def test_others_call_their_closure_first(name):
    assert not needs_other_gradients(ALONE[name](parameters()))


class Counting(torch.optim.SGD):
    """Notes its steps outside of itself."""

    number = 0

    def step(self, closure=None):
        Counting.number += 1
        NOTED.append("step")
        return super().step(closure)


NOTED: list[str] = []


def test_trials_leave_nothing_in_what_a_class_counts_and_hooks_of_all_optimizers_hear_nothing():
    heard = []
    handles = [
        register(lambda *args: heard.append(args))
        for register in (
            register_optimizer_step_pre_hook,
            register_optimizer_step_post_hook,
        )
    ]
    optimizer = Counting([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))], lr=0.1)
    try:
        assert not couples_parameters(optimizer)
        assert not needs_other_gradients(optimizer)
        assert try_optimizers([optimizer], torch.device("cpu")).state_bytes == 0
        assert (Counting.number, NOTED, heard) == (0, [], [])
        optimizer.step()
        assert (Counting.number, NOTED, bool(heard)) == (1, ["step"], True)
    finally:
        for handle in handles:
            handle.remove()


def test_a_hook_of_all_optimizers_may_try_one_while_others_are_to_be_called():
    layer, heard = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    tries = register_optimizer_step_pre_hook(lambda *_: print(couples_parameters(optimizer)))
    hears = register_optimizer_step_pre_hook(lambda *_: heard.append("before"))
    try:
        optimizer.step()
    finally:
        tries.remove()
        hears.remove()
    assert heard == ["before"]
