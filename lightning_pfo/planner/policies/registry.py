"""Policies by name.

=============================  ====================================================================
max_frequency                  every instruction at its stage's top clock
envpipe_TYPE_RECONFIG          EnvPipe's baseline, uniform or envelope; default, greedy or balanced
..._early_forwards             envpipe_envelope_balanced under EnvPipe's own order
zeus_global                    one clock for all GPUs
zeus_per_stage                 a clock for each stage, such that forwards take about as long
zeus_..._power_limit           the same with power limits
perseus                        least energy on fitted curves, in whole milliseconds
ours                           the planner's own: the least energy that it finds
=============================  ====================================================================

`envpipe_baseline` is the same whatever its reconfiguration; `envpipe` is `envpipe_envelope_balanced`.
"""

from __future__ import annotations

from lightning_pfo.core.envpipe import RECONFIGURATIONS
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import did_you_mean, shortened
from lightning_pfo.planner.pipeline.problem import Problem, Rows
from lightning_pfo.planner.policies.envpipe import TYPES, EnvPipe
from lightning_pfo.planner.policies.knobs import KNOBS
from lightning_pfo.planner.policies.perseus import Perseus
from lightning_pfo.planner.policies.policy import ListedPolicy, Policy
from lightning_pfo.planner.policies.top_clocks import top_clocks
from lightning_pfo.planner.policies.zeus import ZeusGlobal, ZeusPerStage


class MaxFrequency(ListedPolicy):
    """The top clocks; see `top_clocks`."""

    @property
    def name(self) -> str:
        """`max_frequency`."""
        return "max_frequency"

    def rows(self, problem: Problem, num_plans: int) -> list[Rows]:
        """The one plan."""
        return [top_clocks(problem)]


class _OnePlan(ListedPolicy):
    """Any `Policy` as one that has a single plan."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def name(self) -> str:
        """The name of the function, or of the class."""
        return str(getattr(self._policy, "__name__", type(self._policy).__name__))

    def rows(self, problem: Problem, num_plans: int) -> list[Rows]:
        """The plan that it takes without a deadline."""
        return [self._policy(problem)]


_ENVPIPE = [EnvPipe(kind, "1f1b", reconfig) for kind in TYPES[1:] for reconfig in RECONFIGURATIONS]
_ENVPIPE.append(EnvPipe(scheduling="ours"))
_ZEUS = [make(knob) for make in (ZeusGlobal, ZeusPerStage) for knob in KNOBS]

LISTED_POLICIES: dict[str, ListedPolicy] = {
    policy.name: policy for policy in (MaxFrequency(), EnvPipe("baseline"), *_ENVPIPE, *_ZEUS, Perseus())
}
"""Everybody else's policies, each once."""

OWN_POLICY = "ours"
_OTHER_NAMES = {
    "top_clocks": "max_frequency",
    "least_energy": OWN_POLICY,
    "envpipe": "envpipe_envelope_balanced",
    **{f"envpipe_baseline_{reconfig}": "envpipe_baseline" for reconfig in RECONFIGURATIONS},
    **{f"zeus_{scope}_frequency": f"zeus_{scope}" for scope in ("global", "per_stage")},
}


def find_policy(given: str | Policy) -> ListedPolicy | None:
    """The policy of a name, or a policy of your own; None for the planner's own.

    Raises:
        ConfigurationError: If there is no policy of that name.
    """
    if not isinstance(given, str) and callable(given):
        return given if isinstance(given, ListedPolicy) else _OnePlan(given)
    name = _OTHER_NAMES.get(given, given) if isinstance(given, str) else given
    if name == OWN_POLICY:
        return None
    if not isinstance(name, str) or name not in LISTED_POLICIES:
        known = [OWN_POLICY, *LISTED_POLICIES]
        raise ConfigurationError(
            f"policy is one of {', '.join(known)}, or a policy of your own; got {shortened(given)}."
            f"{did_you_mean(str(given), [*known, *_OTHER_NAMES])}"
        )
    return LISTED_POLICIES[name]
