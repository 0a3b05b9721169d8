"""Running training scripts in processes of their own, and leaving none behind."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_script(script, *arguments, timeout_s=180, expect_success=True, **environment):
    """Run a Python script; returns the completed process with its output (stdout and stderr together)."""
    process = start_script(script, *arguments, **environment)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        kill_session(process)
    if expect_success and process.returncode != 0:
        raise AssertionError(f"{script} ended with code {process.returncode}:\n{output[-8000:]}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start_script(script, *arguments, **environment):
    """Start a Python script in a session of its own, with a clean distributed environment."""
    dropped = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_GLOBAL_SEED")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=env,
        start_new_session=True,
        preexec_fn=heed_signals,
    )


def heed_signals():
    """For `preexec_fn`: a process started in the background inherits that Ctrl-C is ignored; ours must not."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def kill_session(process):
    """Kill everything the script started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def session_is_empty(process):
    """Whether no process of the script's session is left."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False
