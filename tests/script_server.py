"""A process that has imported what training scripts import, forked for each script: imports cost more than most tests.

`tests/launch.py` starts one for a test run, with the numbers of a listening socket and of a pipe that closes when the
run ends. It imports when the first process of the run connects, which asks over its connection: JSON with `arguments`
(`sys.argv`), `environment` and `folder`, along with files for the output and for the state: a line with the process
number, and the exit code at the end. A script is `__main__`, leads a session of its own, and ends as scripts do.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path

IMPORTS = """
accelerate lightning lightning.pytorch.loggers matplotlib.pyplot torch torch._dynamo torch.distributed.checkpoint
torch.distributed.fsdp torch.distributed.tensor.parallel torch.utils.flop_counter torchmetrics
lightning_pfo.accelerate lightning_pfo.callbacks lightning_pfo.experiment.training lightning_pfo.hydra_app
lightning_pfo.planner lightning_pfo.strategy.trainer.strategy
"""

HARMLESS = {"jemalloc_bg_thd"}
"""Threads that handle forks by themselves: that of pyarrow, which pandas imports where it is installed."""


def serve(listener, end):
    """Fork for each request; returns in the fork. Kills what runs when who asked for it, or the run, has ended."""
    running = {}  # by process number, who asked for it and where its state goes

    def reap(*_):
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            _, state = running.pop(pid)
            os.write(state, b"%d" % os.waitstatus_to_exitcode(status))
            os.close(state)

    signal.signal(signal.SIGCHLD, reap)
    connections = {}  # by the numbers of their files
    while True:
        ready, _, _ = select.select([listener, end, *connections], [], [])
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if end in ready:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            connections[connection.fileno()] = connection
        for number in connections.keys() & set(ready):
            message, files, _, _ = socket.recv_fds(connections[number], 1 << 20, 2)
            if not message:
                connections.pop(number).close()
                for pid, (asked_by, _) in running.items():
                    if asked_by == number:
                        os.killpg(pid, signal.SIGKILL)
                continue
            output, state = files
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                os.setsid()
                os.write(state, b"%d\n" % os.getpid())
                for connection in (listener, *connections.values()):
                    connection.close()
                for each in (state, end, *(other for _, other in running.values())):
                    os.close(each)
                return become(output, **json.loads(message))
            os.close(output)
            running[pid] = number, state
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


def run(script):
    """Run a script and end as Python does, but leave modules to the system: to let go of each copies all memory."""
    code, interrupted = 0, False
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def import_all():
    for name in IMPORTS.split():
        importlib.import_module(name)
    import torch

    from lightning_pfo.strategy.parallel import random_state
    from lightning_pfo.strategy.trainer.clones import keep_memory_shared

    random_state.seed(torch.device("cpu"), 0)  # so that weights that a script draws are the same each time

    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    others = [name for name in threads if name not in HARMLESS]
    assert len(others) == 1, f"forks of a process with threads may hang: {others}"
    keep_memory_shared()
    gc.set_threshold(20_000, 10, 10)  # what is made anew is small


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    listening, run_ends = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if run_ends in select.select([listening, run_ends], [], [])[0]:
        sys.exit()
    import_all()
    run(serve(listening, run_ends))
