"""The routes: Zeus's four, in the form that its clients know; ours for plans by version; and those of operators."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from lightning_pfo.core.wording import cut
from lightning_pfo.server.jobs.answers import NotYet, Refusal, UnavailableError
from lightning_pfo.server.jobs.job import Job
from lightning_pfo.server.jobs.messages import MOST_RANKS, VersionedPlan
from lightning_pfo.server.jobs.wire import schedule_answer
from lightning_pfo.server.web.bodies import JobBody, OperatingPointBody, RankBody, ResultBody, StragglerBody
from lightning_pfo.server.web.guard import Guard
from lightning_pfo.server.web.metrics import metrics_text
from lightning_pfo.server.web.service import ClientLeftError, Service
from lightning_pfo.server.web.status_page import status_html

Rank = Annotated[int, Query(ge=0, lt=MOST_RANKS)]
Step = Annotated[int, Query(ge=0, le=10**12)]
_LONGEST_POLL_S = 30.0
_RETRY_AFTER_S = 5
_CLIENT_LEFT = 499  # nobody reads it


def make_app(service: Service, *, token: str = "", max_body_bytes: int = 8_000_000) -> Guard:
    """The ASGI application.

    Args:
        service: The jobs.
        token: What every request must have; empty for none.
        max_body_bytes: Larger requests are refused.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(service.sweep())
        with _ended_by_signals(service.end):
            yield
        sweeping.cancel()
        service.end()
        service.registry.close()

    app = FastAPI(title="lightning-pfo", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.include_router(_zeus_routes(service))
    app.include_router(_version_routes(service))
    app.include_router(_operator_routes(service))
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(ClientLeftError, lambda request, error: Response(status_code=_CLIENT_LEFT))
    app.add_exception_handler(Exception, _failed)
    guard = Guard(app, token=token, max_body_bytes=max_body_bytes)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics_text(service, guard.answered), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def status() -> HTMLResponse:
        return HTMLResponse(status_html(service))

    return guard


def _zeus_routes(service: Service) -> APIRouter:
    router, registry = APIRouter(), service.registry

    @router.get("/info")
    async def info() -> dict[str, Any]:
        """The artifact's clients ask which knob is turned."""
        return {"scheduler": registry.scheduler, "mode": "frequency"}

    @router.post("/register_job")
    async def register_job(body: JobBody) -> str:
        return service.now(lambda: registry.register_job(body.info()))

    @router.post("/register_rank")
    async def register_rank_of_artifact(body: RankBody) -> None:
        service.now(lambda: registry.register_rank(body.job_id, body.info()))

    @router.post("/register_rank/{job_id}")
    async def register_rank(job_id: str, body: RankBody) -> None:
        service.now(lambda: registry.register_rank(job_id, body.info()))

    @router.get("/schedule/{job_id}")
    async def schedule(job_id: str, rank: Rank, request: Request) -> JSONResponse:
        found, plan = await service.when_there(job_id, lambda: registry.fetch(job_id, rank), request.is_disconnected)
        return JSONResponse(schedule_answer(found, plan.row_of(found)))

    @router.post("/result/{job_id}")
    async def result(job_id: str, body: ResultBody) -> None:
        service.now(lambda: registry.report(job_id, body.report()))

    return router


def _version_routes(service: Service) -> APIRouter:
    router, registry = APIRouter(), service.registry

    @router.get("/jobs/{job_id}/plan")
    async def plan(
        job_id: str,
        rank: Rank,
        request: Request,
        step: Step = 0,
        version: Annotated[int, Query(ge=0, le=10**9)] = 0,
        ahead: Annotated[int, Query(ge=1, le=100_000)] = 1,
        wait_s: Annotated[float, Query(ge=0, le=_LONGEST_POLL_S)] = 0.0,
    ) -> Response:
        """The plan that follows on `version`; 204 if there is none after `wait_s`."""

        def next_plan() -> tuple[dict[str, Any], int]:
            info, newer, unchanged_until = registry.poll(job_id, rank, step, version, ahead)
            if newer is None:
                raise NotYet((), "there is no newer plan")
            return _plan_answer(newer) | {"rank": rank, "frequencies": newer.row_of(info)}, unchanged_until

        try:
            answer, unchanged_until = await service.when_there(job_id, next_plan, request.is_disconnected, wait_s)
        except UnavailableError:
            contact = registry.job(job_id).contacts[rank]
            return Response(
                status_code=204,
                headers={"Retry-After": "1", "Unchanged-Until-Step": str(contact.promised_step)},
            )
        return JSONResponse(answer, headers={"Unchanged-Until-Step": str(unchanged_until)})

    return router


def _operator_routes(service: Service) -> APIRouter:
    router, registry = APIRouter(), service.registry

    @router.get("/jobs")
    async def jobs() -> list[dict[str, Any]]:
        return [_job_answer(job) for job in registry.jobs.values()]

    @router.get("/jobs/{job_id}")
    async def one_job(job_id: str) -> dict[str, Any]:
        return _job_answer(registry.job(job_id, is_sign_of_life=False))

    @router.post("/jobs/{job_id}/straggler")
    async def straggler(job_id: str, body: StragglerBody) -> dict[str, Any]:
        """A replica is slow, and all others wait for it; null or 0: not any more."""
        return _plan_answer(service.now(lambda: registry.operate(job_id, straggler_s=body.t_prime_s or 0.0)))

    @router.post("/jobs/{job_id}/operating_point")
    async def operating_point(job_id: str, body: OperatingPointBody) -> dict[str, Any]:
        return _plan_answer(service.now(lambda: registry.operate(job_id, select=body.select)))

    async def delete(job_id: str) -> None:
        service.now(lambda: registry.delete(job_id))

    for path in ("/jobs/{job_id}", "/job/{job_id}"):
        router.add_api_route(path, delete, methods=["DELETE"])
    return router


def _plan_answer(plan: VersionedPlan) -> dict[str, Any]:
    names = (
        "version", "from_step", "label", "purpose", "iteration_time_s", "iteration_energy_j", "saving_percent",
        "verified",
    )  # fmt: skip
    return {name: getattr(plan, name) for name in names}


def _job_answer(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "world_size": job.info.world_size,
        "pp_degree": job.info.pp_degree,
        "dp_degree": job.info.dp_degree,
        "tp_degree": job.info.tp_degree,
        "ranks": sorted(job.ranks),
        "round": job.round,
        "plan": None if job.plan is None else _plan_answer(job.plan),
        "straggler_s": job.straggler_s,
        "failure": job.failure,
        "steps": {rank: contact.step for rank, contact in sorted(job.contacts.items())},
    }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if isinstance(error, UnavailableError) else None
    return JSONResponse({"detail": str(error)}, error.status, headers)


async def _not_understood(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [
        {"loc": [cut(part, 60) if isinstance(part, str) else part for part in one["loc"]],
         "msg": cut(one["msg"]), "type": one["type"]}
        for one in error.errors()[:20]
    ]  # fmt: skip
    return JSONResponse({"detail": found}, 422)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "The server has met a bug; its log says more. Other jobs go on."}, 500)


@contextlib.contextmanager
def _ended_by_signals(end: Callable[[], None]) -> Any:
    """Answer waiting requests when a signal comes: uvicorn, whose handlers are called afterwards, waits for them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    replaced: dict[int, Any] = {}

    def on_signal(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(end)
        before = replaced[signum]
        if callable(before):
            before(signum, frame)

    for one in (signal.SIGINT, signal.SIGTERM):
        if callable(signal.getsignal(one)):
            replaced[one] = signal.signal(one, on_signal)
    try:
        yield
    finally:
        for number, before in replaced.items():
            if signal.getsignal(number) is on_signal:
                signal.signal(number, before)
