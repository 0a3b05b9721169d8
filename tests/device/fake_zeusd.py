"""A stand-in for the zeusd daemon: `python -m tests.device.fake_zeusd SOCKET`, with what the zeus package asks of it.

It sets clocks through the real pynvml, so together with the fake driver it has the permission that its clients lack.
"""

from __future__ import annotations

import json
import socketserver
import sys
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pynvml


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert urlsplit(self.path).path == "/discover"
        gpus = [{"id": index, "name": "as NVML says"} for index in range(pynvml.nvmlDeviceGetCount())]
        groups = ["gpu-read", "gpu-control"]
        self.answer({"gpus": gpus, "cpus": [], "enabled_api_groups": groups, "auth_required": False})

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        settings = {name: values[0] for name, values in parse_qs(parts.query).items()}
        assert settings["block"] == "true"
        for index in settings["gpu_ids"].split(","):
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(index))
            if parts.path == "/gpu/set_gpu_locked_clocks":
                clocks_mhz = int(settings["min_clock_mhz"]), int(settings["max_clock_mhz"])
                pynvml.nvmlDeviceSetGpuLockedClocks(handle, *clocks_mhz)
            else:
                assert parts.path == "/gpu/reset_gpu_locked_clocks"
                pynvml.nvmlDeviceResetGpuLockedClocks(handle)
        self.answer(None)

    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "a client"

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    pynvml.nvmlInit()
    with socketserver.UnixStreamServer(sys.argv[1], Handler) as server:
        print("serving", flush=True)
        server.serve_forever()
