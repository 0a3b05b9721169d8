from torch import nn

from lightning_pfo.strategy.step.first_batch.modes import modes_set


def test_what_is_in_evaluation_mode_stays_so_whatever_the_step_calls():
    net = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Tanh()))
    frozen = net[1][1].eval()
    train = nn.Module.train
    modes = {module: module is net for module in net.modules()}
    with modes_set(modes):
        for switch in (net.train, lambda: net.train(mode=True), net[1].train):
            net.eval()
            assert not any(module.training for module in net.modules())
            assert isinstance(switch(), nn.Sequential)
            assert not net[0].training
            assert not net[1][0].training
        assert net.train().training
        assert frozen.train().training  # it was in evaluation mode before: that is the step's own doing
    assert nn.Module.train is train
