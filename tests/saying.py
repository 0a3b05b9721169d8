"""What the library says in a test."""

import logging
from contextlib import contextmanager


class Said(logging.Handler):
    """Keeps the messages that it is given."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@contextmanager
def saying():
    """What is said while the context is open."""
    logger, said = logging.getLogger("lightning_pfo"), Said()
    logger.addHandler(said)
    try:
        yield said.texts
    finally:
        logger.removeHandler(said)
