"""What is answered where there is no plan to give: a refusal with its HTTP status, or that something is missing yet."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.wording import counted, listed


class Refusal(PfoError):  # noqa: N818 (an answer like others)
    """A request that cannot be met; the text is a sentence for whoever sent it."""

    status = 409


class UnknownError(Refusal):
    """There is no such job or rank."""

    status = 404


class ConflictError(Refusal):
    """The job is as it is, and this request does not fit it."""

    status = 409


class GoneError(Refusal):
    """The job was there, and is not any more."""

    status = 410


class UnavailableError(Refusal):
    """The server cannot answer now; a later request may be answered."""

    status = 503


class NotYet(Exception):  # noqa: N818 (it is no error)
    """The answer depends on what others have not done yet.

    Attributes:
        missing: The ranks that are waited for; none where the server itself is busy.
        what: What they have not done, e.g. `registered`.
    """

    def __init__(self, missing: Iterable[int], what: str) -> None:
        self.missing, self.what = tuple(sorted(missing)), what
        super().__init__(str(self))

    def __str__(self) -> str:
        if not self.missing:
            return self.what
        return f"{counted(len(self.missing), 'rank')} ({listed(self.missing)}) {self.what}"
