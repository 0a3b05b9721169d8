"""The errors this project raises. Every message states the rule, the value received and the value that would work."""

from collections.abc import Sequence

from lightning_pfo.core.wording import LONGEST_MESSAGE, cut


class PfoError(Exception):
    """Base of all errors raised by lightning_pfo on purpose; its text is a screenful at most, whatever it repeats."""

    def __str__(self) -> str:
        return cut(super().__str__(), LONGEST_MESSAGE)


class ConfigurationError(PfoError, ValueError):
    """A setting cannot work; raised before any work starts."""


class ProfileError(PfoError, ValueError):
    """A profile is missing, malformed or incomplete."""


class PlanError(PfoError, ValueError):
    """A frontier or plan file is malformed, or a selection cannot be met."""


class PlanMismatchError(PlanError):
    """A plan does not fit the pipeline it is to be applied to."""


class DeviceError(PfoError, RuntimeError):
    """A GPU refused or failed an operation."""


class NotSupportedError(DeviceError):
    """This GPU or driver cannot do it at all."""


class ClockPermissionError(DeviceError):
    """The process may not change GPU clocks."""


class BatchError(PfoError, ValueError):
    """A batch cannot be split into microbatches, or ranks received different batches."""


def has_other_batch(ranks: Sequence[int]) -> BatchError:
    """What is said where ranks of a pipeline have received another batch than its first."""
    return BatchError(
        f"All pipeline ranks work on the same batch, but ranks {list(ranks)} received another one than rank 0. Make "
        f"the data pipeline deterministic: give the sampler a generator with a fixed seed, seed processes "
        f"alike (lightning.seed_everything(seed, workers=True), accelerate.utils.set_seed(seed)), and do not let "
        f"ranks read different data, or draw random numbers on some ranks only, as where the first one alone shows "
        f"a sample: what collate_fn or a transform draws after that is other on the others."
    )


class PartitionError(ConfigurationError):
    """A model cannot be split into the requested stages."""
