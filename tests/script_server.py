"""A process that has imported what training scripts import, forked for each script: imports cost more than most tests.

`tests/launch.py` starts it once per test run, and asks over the socket whose number is the argument: JSON with
`arguments` (`sys.argv`), `environment` and the present `folder`, along with files for the output and for the state: a
line with the process number, and the exit code at the end. A script is `__main__`, leads a session of its own, and ends
as scripts do.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

IMPORTS = """
accelerate lightning lightning.pytorch.loggers matplotlib.pyplot torch torch._dynamo torch.distributed.checkpoint
torch.distributed.fsdp torch.distributed.tensor.parallel torch.utils.flop_counter torchmetrics
lightning_pfo.accelerate lightning_pfo.callbacks lightning_pfo.experiment.training lightning_pfo.hydra_app
lightning_pfo.planner lightning_pfo.strategy.trainer.strategy
"""


def serve(connection):
    """Fork for each request; returns in the fork. Kills what still runs when the test run has ended."""
    states = {}  # of what runs, by process number

    def reap(*_):
        while states:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            state = states.pop(pid)
            os.write(state, b"%d" % os.waitstatus_to_exitcode(status))
            os.close(state)

    signal.signal(signal.SIGCHLD, reap)
    while True:
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if not message:
            for pid in states:
                os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        output, state = files
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os.setsid()
            os.write(state, b"%d\n" % os.getpid())
            for number in (state, connection.detach(), *states.values()):
                os.close(number)
            return become(output, **json.loads(message))
        os.close(output)
        states[pid] = state
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def become(output, arguments, environment, folder):
    """Make this process as a fresh one would be; returns the script to run."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # the server's believe that they can seek
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        if (library := Path(folder, "libnvidia-ml.so.1")).exists():
            ctypes.CDLL(str(library))  # the loader found libraries by the variable as it was when the server began
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    return arguments[0]


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    for name in IMPORTS.split():
        importlib.import_module(name)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "forks of a process with threads may hang"
    gc.freeze()
    runpy.run_path(serve(socket.socket(fileno=int(sys.argv[1]))), run_name="__main__")
