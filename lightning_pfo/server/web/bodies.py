"""Bodies of requests: what they may say. Unknown fields are ignored, as by Zeus's server."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, BaseModel, Field, FiniteFloat, field_validator, model_validator

from lightning_pfo.server.jobs.messages import MOST_RANKS, JobInfo, RankInfo, Report

_MOST_CLOCKS, _MOST_INSTRUCTIONS, _MOST_NAMES, _MOST_ITERATIONS = 2_000, 100_000, 32, 100_000

Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
RankNumber = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Clock = Annotated[int, Field(ge=0, le=100_000)]
Text = Annotated[str, Field(max_length=200)]
Measurement = Annotated[FiniteFloat, Field(ge=0, le=1e12)]
Measurements = Annotated[list[Measurement], Field(max_length=_MOST_ITERATIONS)]
Breakdown = Annotated[dict[Text, list[Measurements]], Field(max_length=_MOST_NAMES)]


class JobBody(BaseModel):
    """`POST /register_job`."""

    job_id: Text = ""
    pp_degree: Degree
    dp_degree: Degree
    tp_degree: Degree
    world_size: Degree
    job_metadata: Annotated[str, Field(max_length=1_000)] | None = None
    request_id: Text | None = None

    @field_validator("job_id")
    @classmethod
    def _is_given_by_the_server(cls, value: str) -> str:
        if value:
            raise ValueError("the server names jobs; leave job_id out")
        return value

    @model_validator(mode="after")
    def _is_a_product(self) -> JobBody:
        if self.pp_degree * self.dp_degree * self.tp_degree != self.world_size:
            raise ValueError(f"world_size is pp_degree x dp_degree x tp_degree ; got {self.world_size}")
        return self

    def info(self) -> JobInfo:
        """The job."""
        return JobInfo(
            self.pp_degree,
            self.dp_degree,
            self.tp_degree,
            self.world_size,
            self.job_metadata or "",
            self.request_id or "",
        )


class RankBody(BaseModel):
    """`POST /register_rank/{job_id}`, and the artifact's `POST /register_rank` with the job in the body."""

    job_id: Text = ""
    rank: RankNumber
    dp_rank: RankNumber
    pp_rank: RankNumber
    tp_rank: RankNumber
    available_frequencies: list[Clock] = Field(
        validation_alias=AliasChoices("available_frequencies", "power_state_range"), max_length=_MOST_CLOCKS
    )
    pipe_schedule: list[Text] = Field(default=[], max_length=_MOST_INSTRUCTIONS)

    def info(self) -> RankInfo:
        """The rank."""
        clocks_mhz = tuple(sorted(set(self.available_frequencies), reverse=True))
        return RankInfo(self.rank, self.dp_rank, self.pp_rank, self.tp_rank, clocks_mhz, tuple(self.pipe_schedule))


class ResultBody(BaseModel):
    """`POST /result/{job_id}`."""

    rank: RankNumber
    iter_time: Measurements
    iter_energy: Measurements
    time_breakdown: Breakdown = {}
    energy_breakdown: Breakdown = {}
    energy_stderr: Annotated[dict[Text, Measurement], Field(max_length=_MOST_NAMES)] = {}
    version: int | None = Field(default=None, ge=1, le=1_000_000_000)

    def report(self) -> Report:
        """The report."""
        return Report(
            self.rank,
            tuple(self.iter_time),
            tuple(self.iter_energy),
            self.time_breakdown,
            self.energy_breakdown,
            self.energy_stderr,
            self.version,
        )


class StragglerBody(BaseModel):
    """`POST /jobs/{job_id}/straggler`."""

    t_prime_s: Annotated[FiniteFloat, Field(ge=0, le=1e6)] | None = None


class OperatingPointBody(BaseModel):
    """`POST /jobs/{job_id}/operating_point`."""

    select: Annotated[str, Field(min_length=1, max_length=64)]
