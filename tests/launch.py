"""Running training scripts in processes of their own, and leaving none behind."""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCHRUN = Path(__file__).with_name("torchrun.py")
"""Torch's command for scripts that may be forked."""
FOR_SCRIPTS = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of all scripts."""
_ADDRESS = "PFO_SCRIPT_SERVER"


def of_ranks(folder, num_ranks):
    """What the ranks of a script have written into `rank_N.json`."""
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(num_ranks)]


def run_script(script, *arguments, timeout_s=500, expect_success=True, fresh=False, **environment):
    """Run a Python script; returns the completed process with its output (stdout and stderr together)."""
    process = start_script(script, *arguments, fresh=fresh, **environment)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        kill_session(process)
    if expect_success and process.returncode != 0:
        raise AssertionError(f"{script} ended with code {process.returncode}:\n{output[-8000:]}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start_script(script, *arguments, fresh=False, **environment):
    """Start a Python script in a session of its own, with a clean distributed environment.

    It is forked from a process that has imported all it needs; if `fresh`, it is started as users do.
    """
    dropped = (
        "LOCAL_RANK",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "PL_GLOBAL_SEED",
        _ADDRESS,
    )
    env = {key: value for key, value in os.environ.items() if key not in (*dropped, _ADDRESS)}
    env |= {
        **FOR_SCRIPTS,
        **environment,
    }
    command = [str(script), *map(str, arguments)]
    if not fresh:
        return ForkedScript(command, env)
    return start_interpreter(command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_interpreter(command, env, **options):
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
        preexec_fn=heed_signals,
        **options,
    )


class ForkedScript:
    """A script forked by `script_server.py`; has what is used here of `subprocess.Popen`."""

    def __init__(self, command, env):
        self.args, self.returncode = command, None
        (output, write_output), (state, write_state) = os.pipe(), os.pipe()
        # the state is not buffered: a process that has ended at once has told its exit code too
        self.stdout, self._state = os.fdopen(output), os.fdopen(state, "rb", buffering=0)
        message = json.dumps({"arguments": command, "environment": env, "folder": str(Path.cwd())}).encode()
        socket.send_fds(_connection(), [message], [write_output, write_state])
        os.close(write_output)
        os.close(write_state)
        pid = self._state.readline()
        assert pid, "the process that forks scripts has ended; its error message is among the output of this test run"
        self.pid = int(pid)

    def wait(self, timeout=None):
        if self.returncode is None:
            self.returncode = int(self._read(self._state, timeout))
            self._state.close()
        return self.returncode

    def communicate(self, timeout=None):
        output = self._read(self.stdout, timeout)
        self.stdout.close()
        self.wait(timeout)
        return output, None

    def _read(self, file, timeout):
        """Returns all until the end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        poll, parts = select.poll(), []
        poll.register(file, select.POLLIN)
        while poll.poll(None if deadline is None else max(0, 1e3 * (deadline - time.monotonic()))):
            part = os.read(file.fileno(), 1 << 16)
            if not part:
                return b"".join(parts).decode()
            parts.append(part)
        raise subprocess.TimeoutExpired(self.args, timeout, b"".join(parts))


def start_script_server():
    """Start the process that forks scripts, for this process and those that it starts; it ends when this one does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # to an abstract address that the kernel chooses
    listener.listen()
    end, _ = os.pipe()  # the other end is closed when this process ends
    script = Path(__file__).with_name("script_server.py")
    arguments, files = [str(script), str(listener.fileno()), str(end)], [listener.fileno(), end]
    start_interpreter(arguments, os.environ | FOR_SCRIPTS, stdout=subprocess.DEVNULL, pass_fds=files)
    os.environ[_ADDRESS] = os.fsdecode(listener.getsockname()[1:])
    listener.close()
    os.close(end)


@functools.cache
def _connection():
    """To the process that forks scripts, which imports for several seconds when the first connects."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(b"\0" + os.fsencode(os.environ[_ADDRESS]))
    return connection


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
