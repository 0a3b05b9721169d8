"""The energy that a GPU has used so far, at any moment, whatever counter it has."""

from __future__ import annotations

import logging

from lightning_pfo.core.errors import DeviceError, NotSupportedError
from lightning_pfo.device.energy.sampler import EnergySampler
from lightning_pfo.device.energy.trace import EnergyTrace
from lightning_pfo.device.gpu import Gpu

logger = logging.getLogger(__name__)

_USUAL_TICK_S = 0.1


class EnergyReader:
    """Tells the energy used so far at any moment, until `close`.

    A counter that ticks is watched meanwhile, and its last tick continued: read as it is, the energy of an iteration
    that takes a few ticks would be wrong by up to one of them. Where there is no counter, power is integrated.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._sampler: EnergySampler | None = None
        self._error: DeviceError | None = None
        try:
            gpu.total_energy_mj()
        except NotSupportedError:
            logger.warning("%s has no energy counter: its power is integrated instead, which is less exact.", gpu.name)
        except DeviceError as error:  # is told to whoever asks for an energy, as one that comes later is
            self._error = error
            return
        else:
            if gpu.energy_is_continuous:
                return
        self._sampler = EnergySampler(gpu, with_state=False)
        self._sampler.start()

    def energy_j(self) -> float:
        """Energy so far, J.

        Raises:
            DeviceError: If the counter cannot be read, or was reset.
        """
        if self._error is not None:
            raise self._error
        if self._sampler is None:
            return self._gpu.total_energy_mj() / 1000
        if self._sampler.error is not None:
            raise self._sampler.error
        return self._sampler.energy_now_j()

    @property
    def tick_s(self) -> float:
        """How often the counter advances, s; 0: all the time. Until that is known, 0.1: few real ones are slower."""
        return 0.0 if self._sampler is None else self._sampler.tick_s or _USUAL_TICK_S

    def trace(self, from_s: float) -> EnergyTrace | None:
        """Ticks since a time; None where the counter does not tick."""
        return self._sampler.trace(from_s) if self._sampler is not None else None

    def close(self) -> None:
        """Stop watching. May be called twice."""
        if self._sampler is not None:
            self._sampler.stop()
