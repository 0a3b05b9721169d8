"""The errors this project raises. Every message states the rule, the value received and the value that would work."""

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


class PartitionError(ConfigurationError):
    """A model cannot be split into the requested stages."""
