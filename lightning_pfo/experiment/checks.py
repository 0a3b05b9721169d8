"""What is checked before an experiment starts: all that can be known while there is one process and no work is done."""

from __future__ import annotations

import os
from typing import Any

from lightning_pfo.callbacks.frequency_plan import TOP_CLOCKS
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import check_above, check_between
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.schedules.validation import make_checked_schedule
from lightning_pfo.core.wording import counted
from lightning_pfo.device import open_gpu
from lightning_pfo.experiment.accelerator import check_shared_gpus
from lightning_pfo.experiment.command_line.instances import check_targets, make_callbacks
from lightning_pfo.experiment.config import ExperimentConfig, PlanConfig
from lightning_pfo.experiment.training import MakeData, MakeModule, make_trainer, planning_of
from lightning_pfo.listeners.profiling_run import ScanSettings, clocks_to_scan
from lightning_pfo.planner import read_profile
from lightning_pfo.planner.frontier.data import OURS
from lightning_pfo.planner.policies.envpipe import EnvPipe
from lightning_pfo.planner.policies.registry import find_policy
from lightning_pfo.planner.profile.blocking_power import check_blocking_power
from lightning_pfo.strategy.model.partition import check_partition
from lightning_pfo.strategy.model.split import check_split
from lightning_pfo.strategy.trainer.precision import check_precision


def check_experiment(config: ExperimentConfig, make_module: MakeModule, make_data: MakeData) -> None:
    """Check everything; where Lightning starts the processes, before it does.

    Args:
        config: The experiment.
        make_module: Makes the LightningModule, to see whether it can be split.
        make_data: Makes the LightningDataModule, to see whether it can be made.

    Raises:
        PfoError: If something cannot work.
    """
    check_settings(config)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # the first process of this node has looked, or does now
    trainer = make_trainer(config, [], {})
    check_precision(trainer.precision_plugin)
    gpu = open_gpu(config.gpu, 0, num_gpus=config.trainer.devices)
    try:
        clocks_to_scan(ScanSettings(**vars(config.profiler)), gpu, config.gpu)
    finally:
        gpu.close()
    make_callbacks(config.callbacks)
    check_targets("logger", config.logger)
    check_split(make_module(), config.schedule.partition, schedule_of(config).num_stages)
    data = make_data()
    data.prepare_data()
    data.setup("fit")


def check_settings(config: ExperimentConfig) -> None:
    """Check the settings themselves.

    Raises:
        ConfigurationError: If one is out of range, no step remains to be measured, or the schedule is impossible.
        PlanError: If `plan.select` is not understood.
    """
    trainer, plan = config.trainer, config.plan
    check_between("seed", config.seed, 0, 2**32 - 1)
    check_between("trainer.devices", trainer.devices, 1)
    check_between("trainer.num_nodes", trainer.num_nodes, 1)
    check_between("trainer.val_batches", trainer.val_batches, 0)
    check_between("gpu.straggler_index", config.gpu.straggler_index, -1, trainer.devices - 1)
    if not 1 <= trainer.warmup_steps < trainer.window_steps:
        raise ConfigurationError(
            f"trainer.warmup_steps is at least 1 and below trainer.window_steps, so that iterations of each window "
            f"remain to be measured; got {trainer.warmup_steps} of {trainer.window_steps} steps. Use "
            f"trainer.warmup_steps=1 trainer.window_steps={max(2, trainer.window_steps)}."
        )
    if trainer.steps < 1 or trainer.steps % trainer.window_steps:
        whole = trainer.window_steps * max(1, round(trainer.steps / trainer.window_steps))
        raise ConfigurationError(
            f"trainer.steps are whole windows of trainer.window_steps; got {trainer.steps} and {trainer.window_steps}. "
            f"Use trainer.steps={whole}."
        )
    check_shared_gpus(config)
    schedule = schedule_of(config)
    check_partition(config.schedule.partition)
    ScanSettings(**vars(config.profiler))
    if plan.auto:
        _check_one_run(config)
    planning_of(config).check()
    policy = find_policy(policy_of(plan))
    if policy is not None:
        policy.check_schedule(config.schedule.name)
        if plan.select == "no_slowdown" and policy.name != "max_frequency":
            raise ConfigurationError(
                f"Plans of policy {policy.name} may all be slower than the top clocks, so plan.select=no_slowdown may "
                "find none after all the profiling. Use plan.select=own, which is what the policy takes itself."
            )
    _check_compared(plan)
    check_blocking_power(plan.p2p_blocking_power_w, schedule.num_stages)
    if config.profile:
        check_profile(config.profile, schedule.num_stages)


def _check_compared(plan: PlanConfig) -> None:
    """Check the policies that are compared in one training, and whether EnvPipe can reconfigure during one."""
    own = find_policy(policy_of(plan))
    taken = ["max_frequency" if plan.select == TOP_CLOCKS else OURS if own is None else own.name]
    for name in plan.compare:
        policy = find_policy(name)
        called = OURS if policy is None else policy.name
        if called in taken or called == "max_frequency":
            raise ConfigurationError(
                "plan.compare names each policy once, without that of the plan and without the top clocks, which have "
                f"their windows anyway; got {name} beside {', '.join(taken)}."
            )
        if isinstance(policy, EnvPipe) and policy.runs_early:
            raise ConfigurationError(
                f"A training has one order of instructions, and {called} has its own. Train under that by "
                "plan=envpipe_envelope, and compare others under it: plan.compare=[ours]."
            )
        taken.append(called)
    if plan.online and not (plan.policy == "envpipe" and plan.type != "baseline" and plan.reconfig != "default"):
        raise ConfigurationError(
            "plan.online=true is EnvPipe's reconfiguration during a training, greedy or balanced, of uniform clocks or "
            f"the envelope; got plan.policy={plan.policy}, plan.type={plan.type} and plan.reconfig={plan.reconfig}. "
            "Use plan=envpipe_envelope plan.online=true."
        )
    check_above("plan.threshold_scale", plan.threshold_scale, 0)


def _check_one_run(config: ExperimentConfig) -> None:
    plan = config.plan
    given = [
        *([f"profile={config.profile}"] if config.profile else []),
        *([f"plan.select={TOP_CLOCKS}"] if plan.select == TOP_CLOCKS else []),
        *([f"plan.policy={plan.policy}"] if find_policy(policy_of(plan)) is not None else []),
        *([f"plan.compare={plan.compare}"] if plan.compare else []),
        *(["plan.online=true"] if plan.online else []),
    ]
    if given:
        raise ConfigurationError(
            "A run that optimises itself (plan=auto) measures and plans while it trains, where the planner's own plans "
            f"are most uncertain; got {' and '.join(given)}. Leave that out, or use another plan, such as "
            "plan=no_slowdown."
        )


def check_profile(path: str, num_stages: int) -> None:
    """Check that an earlier profile can be planned with.

    Raises:
        ProfileError: If it cannot be read.
        ConfigurationError: If it has another number of stages.
    """
    found = read_profile(path).num_stages
    if found != num_stages:
        raise ConfigurationError(
            f"A profile is of the pipeline that is planned for; {path} has {counted(found, 'stage')}, this one "
            f"{num_stages}. Use trainer.devices={found}, or leave profile out to measure."
        )


def policy_of(plan: PlanConfig) -> Any:
    """The policy of the plans: by its name, or EnvPipe's by its words; what an online reconfiguration begins with.

    Raises:
        ConfigurationError: If one of EnvPipe's words is not among its own.
    """
    if plan.policy != "envpipe":
        return plan.policy
    reconfig = "default" if plan.online else plan.reconfig
    return EnvPipe(plan.type, plan.scheduling, reconfig, plan.max_in_flight, plan.step_mhz)


def schedule_of(config: ExperimentConfig) -> PipelineSchedule:
    """The schedule of the experiment's iterations.

    Raises:
        ConfigurationError: If it is impossible.
    """
    num_ranks = config.trainer.devices * config.trainer.num_nodes
    return make_checked_schedule(config.schedule.name, num_ranks, config.schedule.num_microbatches)
