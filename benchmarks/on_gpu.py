"""What to run first on a machine with GPUs: one command, no further thought.

    python benchmarks/on_gpu.py [set_clocks=true] [share=true] [output_dir=outputs/on_gpu] [gpu=nvml] [limit_s=570]

No clock is changed unless set_clocks=true asks for it, and then on GPUs only that nobody else uses (share=true: on
those too). Runs, one after the other and each on its own, what could not be tested without a GPU:

1. `lightning-pfo gpu`: GPUs, permission, latency of clock changes, ticks of the energy counter
2. `benchmarks/own_clock.py`: what the GPU draws while it is idle, blocked and busy, whether energy is attributed to
   instructions as its counter has it, and whether events tell the time of instructions, all at the GPU's own clock
3. `benchmarks/clock_overhead.py`: events and clock control, over nccl in a world of one, cost at most 0.5 % of a step;
   requests go all the way, but the clocks are left alone
4. `examples/gpt/train.py`: profile, plan and training on up to 4 GPUs over nccl (on one GPU a pipeline of one stage);
   clocks and energy are those of an emulated GPU unless clocks may be changed
5. the same, smaller, in stages that share one GPU over gloo

With set_clocks=true, and where this process may change clocks, also

6. the overhead with clocks that change
7. a process that changes clocks is killed with SIGKILL: its lease goes within 5 s
8. `lightning-pfo p2p-power`, where there are two GPUs

Prints a line for each, and writes what each said into `output_dir`. Exits with the number of those that failed. Nothing
is installed; matplotlib, several GPUs or permission to set clocks may be missing, and what needs them is left out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_pfo.cli.settings import read_settings, without_dashes
from lightning_pfo.core.errors import PfoError
from lightning_pfo.device import load_gpu_config, open_gpu
from lightning_pfo.device.backends import nvml
from lightning_pfo.device.report import probe_permission
from lightning_pfo.device.safety.lease import read_leases

ROOT = Path(__file__).parents[1]
RESTORED_WITHIN_S = 5.0
GPT = (
    "model.num_blocks=24 model.width=1024 model.num_heads=16 data.sequence_length=512 data.batch_size=64 "
    "trainer.precision=bf16-mixed trainer.steps=36 trainer.window_steps=6 trainer.warmup_steps=2 profiler=quick"
)
SHARED = "trainer=quick profiler=quick trainer.devices=4 trainer.accelerator=gpu trainer.share_gpus=true"


@dataclass
class Settings:
    """What can be told on the command line."""

    output_dir: str = "outputs/on_gpu"
    gpu: str = "nvml"
    limit_s: float = 570.0
    set_clocks: bool = False
    share: bool = False
    train: str = GPT


class Session:
    """Runs commands, keeps what they said, and counts failures."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder = folder
        self._limit_s = limit_s
        self.num_failures = 0
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *command: str) -> None:
        """Run a Python command of the project; its last line is shown, the rest goes into a file."""
        started_s = time.monotonic()
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        with (self._folder / f"{name}.log").open("w+", encoding="utf-8") as log:
            try:
                code = subprocess.run(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=self._limit_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
            log.seek(0)
            said = log.read()
        last = next((line for line in reversed(said.splitlines()) if any(map(str.isalnum, line))), "")
        self.say(name, code == 0, f"{time.monotonic() - started_s:.0f} s; {last}")

    def say(self, name: str, is_well: bool, text: str) -> None:
        """Print the outcome of one check."""
        self.num_failures += not is_well
        print(f"{'ok     ' if is_well else 'FAILED '} {name}: {text}", flush=True)

    def skip(self, name: str, why: str) -> None:
        """Print that a check is left out."""
        print(f"skipped {name}: {why}", flush=True)


def why_not_set_clocks(settings: Settings) -> str:
    """Why the clocks of the first GPU are left alone; empty: they may be set."""
    if not settings.set_clocks:
        return "it changes clocks: set_clocks=true"
    try:
        gpu = open_gpu(replace(load_gpu_config(settings.gpu), share=settings.share), 0)
    except PfoError as error:
        return str(error)
    try:
        may_set, why = probe_permission(gpu)
        return "" if may_set else why
    finally:
        gpu.close()


def killed_process_is_cleaned_up(gpu: str) -> tuple[bool, str]:
    """Kill a process that changes clocks, and wait until its lease is undone."""
    command = [sys.executable, "-m", "tests.device.locking_process", gpu, "slow"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        is_locked = process.stdout.readline() == "locked\n"
        time.sleep(1)
        process.kill()
    if not is_locked:
        return False, "the clocks could not be locked"
    killed_s = time.monotonic()
    while any(lease.holder.pid == process.pid for lease in read_leases()):
        if time.monotonic() > killed_s + 2 * RESTORED_WITHIN_S:
            break
        time.sleep(0.01)
    passed_s = time.monotonic() - killed_s
    return passed_s <= RESTORED_WITHIN_S, f"lease undone after {passed_s:.2f} s (wanted: {RESTORED_WITHIN_S:g} s)"


def main(arguments: list[str]) -> int:
    """Run everything that this machine allows; returns the number of failures."""
    try:
        settings: Settings = read_settings(Settings, without_dashes(arguments))
    except PfoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    num_gpus = nvml.visible_gpu_count()
    folder = Path(settings.output_dir).absolute()
    session = Session(folder, settings.limit_s)
    gpu = f"gpu={settings.gpu}"

    why_not = why_not_set_clocks(settings)
    share = f"share={str(settings.share).lower()}"
    session.run("gpu", "-m", "lightning_pfo", "gpu", gpu, share, f"probe={str(not why_not).lower()}")
    session.run("own_clock", "benchmarks/own_clock.py", gpu)
    overhead = ("benchmarks/clock_overhead.py", gpu, "steps=40")
    session.run("overhead_dry_run", *overhead)
    trains = ("examples/gpt/train.py", f"trainer.devices={min(4, max(1, num_gpus))}", *settings.train.split())
    chosen = ("gpu=emulated_a100",) if why_not else (gpu, f"gpu.{share}")
    session.run("train", *trains, *chosen, f"output_dir={folder / 'train'}")
    if num_gpus:
        session.run("shared_gpu", "examples/gpt/train.py", *SHARED.split(), f"output_dir={folder / 'shared_gpu'}")
    else:
        session.skip("shared_gpu", "it needs a GPU; none here")
    if why_not:
        for name in ("overhead", "kill", "p2p_power"):
            session.skip(name, why_not)
        return session.num_failures
    session.run("overhead", *overhead, "sets_clocks=true", share)
    if settings.share:
        session.skip("kill", "it is not tried on a GPU that others use: share=false")
    else:
        session.say("kill", *killed_process_is_cleaned_up(settings.gpu))
    if num_gpus >= 2:
        session.run("p2p_power", "-m", "lightning_pfo", "p2p-power", gpu, share)
    else:
        session.skip("p2p_power", f"it needs two GPUs; {num_gpus} here")
    return session.num_failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
