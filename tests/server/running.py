"""A server as users start it, in a process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

from tests.launch import FOR_SCRIPTS


class RunningServer:
    """One server; `ask` sends JSON and returns status and answer."""

    def __init__(self, *settings):
        environment = {**os.environ, **FOR_SCRIPTS}
        command = [sys.executable, "-m", "lightning_pfo", "serve", *settings]
        self.process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        said = ""
        while not (found := re.search(r"at (https?://\S+);", said)):
            line = self.process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        self.url = found[1]

    def ask(self, method, path, body=None, timeout_s=60):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                text = response.read()
                return response.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def end(self, signum=signal.SIGTERM):
        """End it; returns what it said."""
        self.process.send_signal(signum)
        try:
            return self.process.communicate(timeout=30)[1]
        finally:
            self.kill()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running_server(*settings):
    server = RunningServer(*settings)
    try:
        yield server
    finally:
        server.kill()
        server.process.stderr.close()
