import contextlib
import time

import pytest

from lightning_pfo.client.server_link import ServerAwayError, ServerLink, ServerRefusalError

NUM_DRIPS, DRIP_S, TIMEOUT_S = 200, 0.1, 0.5
"""Each byte comes in time, all of them do not."""


def drip(handler, piece, before=b""):
    with contextlib.suppress(OSError):  # nobody listens any more
        handler.wfile.write(before)
        for _ in range(NUM_DRIPS):
            handler.wfile.write(piece)
            handler.wfile.flush()
            time.sleep(DRIP_S)


def drip_body(handler):
    drip(handler, b" ", b"HTTP/1.0 200 OK\r\n\r\n")


def drip_headers(handler):
    drip(handler, b"x", b"HTTP/1.0 200 OK\r\nSlow: ")


def drip_error(handler):
    drip(handler, b" ", b"HTTP/1.0 409 Conflict\r\n\r\n")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (drip_body, ServerAwayError, "does not answer"),
        (drip_headers, ServerAwayError, "does not answer"),
        (drip_error, ServerRefusalError, "answers 409: Conflict"),
    ],
)
def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(serve, answer, error, said):
    with pytest.raises(error, match=said):
        ServerLink(serve(answer)).get("/jobs", {}, timeout_s=TIMEOUT_S)
    with pytest.raises(error, match=said):
        ServerLink(serve(answer)).post("/jobs", {}, timeout_s=TIMEOUT_S)


@pytest.mark.timeout(60)
def test_a_large_answer_that_comes_in_pieces_is_whole(serve_json):
    text = b"[" + b"1, " * 1_000_000 + b"1]"
    assert ServerLink(serve_json({"/": (text, "0")})).get("/jobs", {}, timeout_s=50.0).content == [1] * 1_000_001


@pytest.mark.timeout(60)
def test_what_is_no_json_is_quoted(serve_json):
    link = ServerLink(serve_json({"/": (b"<html>hello</html>", "0")}))
    with pytest.raises(ServerAwayError, match=r"answers what is no JSON: '<html>hello</html>'\. Is it the URL of"):
        link.get("/jobs", {}, timeout_s=50.0)
