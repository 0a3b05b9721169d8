"""Starting the processes of a run: the script is run again or cloned, or functions are forked or spawned."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy.engine.endings import InterruptedAtOnce
from lightning_pfo.strategy.trainer.clones import clone_process, keep_memory_shared, why_not_clone
from lightning_pfo.strategy.trainer.compat import ForkLauncherBase, ScriptLauncherBase, share_threads
from lightning_pfo.strategy.watch.errors import RankDiedError

_log = logging.getLogger(__name__)
_LAUNCHER_PID = "PFO_LAUNCHER_PID"
_INTERRUPTED = 128 + signal.SIGINT
START_METHODS = ("popen", "clone", "spawn", "fork", "forkserver")
"""As for Lightning's DDP: `popen` runs the script again; `fork` works in notebooks, as long as they used no CUDA.

`clone` is as `popen`, without running again what the script has done by then: each process goes on with the script.
"""


def _guarded(trainer: pl.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one of the Trainer's functions; tell the other ranks how it ends, and say which of them ended it."""
    strategy: Any = trainer.strategy
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        if strategy.rank_watch is not None:
            # what fails because another rank is gone fails a little before the news arrive; a mistake of the user's
            # that all ranks have found is raised by each, also where others have ended by now
            cause = strategy.rank_watch.failed(error, wait_s=2.0 if isinstance(error, RuntimeError) else 0.0)
            strategy.save_only_together(trainer, wait_s=1.0 if isinstance(error, InterruptedAtOnce) else 5.0)
            if cause is not None and isinstance(error, Exception) and not isinstance(error, PfoError):
                raise RankDiedError(cause) from error
        raise
    if strategy.rank_watch is not None:
        strategy.rank_watch.done()
    return result


class ScriptLauncher(ScriptLauncherBase):
    """Runs the script again for each further process, unless torchrun or SLURM started them all.

    Until the processes are connected, they look after each other here; from then on `RankWatch` does.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        strategy: Any = trainer.strategy
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if _LAUNCHER_PID not in os.environ and not self.cluster_environment.creates_processes_externally:
            os.environ[_LAUNCHER_PID] = str(os.getpid())
            self.start_processes()
        launcher_pid = int(os.environ.pop(_LAUNCHER_PID, os.getpid()))
        check = self._check_children if launcher_pid == os.getpid() else partial(_check_launcher, launcher_pid)
        share_threads(num_processes=self.num_processes)
        with _checked_until_connected(strategy, check):
            return _guarded(trainer, function, *args, **kwargs)

    def start_processes(self) -> None:
        """Start the further processes of this node; they are in `procs` then."""
        self.start_scripts()

    def _check_children(self) -> None:
        for local_rank, process in enumerate(self.procs, start=1):
            if process.poll() is not None:
                self.kill(signal.SIGKILL)
                if process.returncode == -signal.SIGINT:  # Ctrl-C, which this process hears only when it has connected
                    _end("it was interrupted", _INTERRUPTED)
                _end(f"the process of local rank {local_rank} ended with code {process.returncode} before it connected")


class CloneLauncher(ScriptLauncher):
    """Forks this process for each further one, and lets all go on with the script; runs it again where forks may hang.

    The script's imports, model and data are in memory once, as far as nobody writes to it. Python does at its end;
    where memory is short, `os._exit` ends further ranks without.
    """

    @override
    def start_processes(self) -> None:
        reason = why_not_clone()
        if reason is not None:
            _log.info("The script is run again for each process, instead of forking this one, because %s.", reason)
            super().start_processes()
            return
        environment = self.cluster_environment  # what Lightning tells scripts
        os.environ |= {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        keep_memory_shared()
        for local_rank in range(1, self.num_processes):
            clone = clone_process()
            if clone is None:
                os.environ["LOCAL_RANK"] = str(local_rank)
                environment.set_global_rank(environment.node_rank() * self.num_processes + local_rank)  # who is silent
                self.procs = []
                return
            self.procs.append(clone)  # type: ignore[arg-type]  # has what is used of a Popen


def _check_launcher(pid: int) -> None:
    if os.getppid() != pid:
        _end("the process that started it has ended")


@contextmanager
def _checked_until_connected(strategy: Any, check: Callable[[], None]) -> Iterator[None]:
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.5) and strategy.rank_watch is None:
            check()

    watch = threading.Thread(target=look, name="pfo-launch-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _end(reason: str, status: int = 1) -> None:
    _log.critical("This process is ended, because %s.", reason)
    logging.shutdown()
    os._exit(status)


class ForkLauncher(ForkLauncherBase):
    """Forks or spawns the processes; the model of the calling process gets the trained weights of all stages."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        return super().launch(partial(_guarded, trainer, function), *args, trainer=trainer, **kwargs)

    @override
    def collect_results(self, trainer: pl.Trainer, results: Any) -> Any:
        fitted = trainer.state.fn == TrainerFn.FITTING
        state = trainer.strategy.gather_module_state() if fitted else {}  # type: ignore[attr-defined]
        with _state_dict_is(state, trainer.lightning_module):
            return super().collect_results(trainer, results)


@contextmanager
def _state_dict_is(state: dict[str, Any], module: pl.LightningModule) -> Iterator[None]:
    """Let `module.state_dict()` return `state`: its own has placeholders for the layers of other stages."""
    module.__dict__["state_dict"] = lambda: state
    try:
        yield
    finally:
        del module.__dict__["state_dict"]
