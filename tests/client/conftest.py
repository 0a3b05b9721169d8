import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@pytest.fixture
def serve():
    """Starts a server on a free port that answers by a function of the request's handler; returns its URL."""
    servers = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer(self)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *arguments):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        servers[-1].daemon_threads = True
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def serve_json(serve):
    """The same with texts to be sent as they are: by the start of the path, the text and the promised step."""

    def start(texts):
        def answer(handler):
            text, promised = next(answer for path, answer in texts.items() if handler.path.startswith(path))
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(text)))
            handler.send_header("Unchanged-Until-Step", promised)
            handler.end_headers()
            handler.wfile.write(text)

        return serve(answer)

    return start
