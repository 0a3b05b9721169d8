"""An oracle for timelines: every rank of a pipeline is played in ticks of time, its clock landing late.

Every stage is on a rank of its own, or transfers take no time.
"""

from lightning_pfo.core.instruction import Instruction, InstructionType

F, B = InstructionType.FORWARD, InstructionType.BACKWARD


def play_in_ticks(profile, plan, power_at, latency_s, tick_s=5e-5):
    """Time and energy of a plan with forwards and full backwards; `power_at(clock)` is the blocking power."""
    now, ranks = ranks_in_ticks(profile, plan, power_at, latency_s, tick_s)
    return now, sum(rank.energy for rank in ranks)


def ranks_in_ticks(profile, plan, power_at, latency_s, tick_s=5e-5):
    """Time of an iteration, and the ranks at its end."""
    schedule = plan.schedule
    on_the_way = []  # when the output of an instruction will be where it is needed
    ranks = [Rank(profile, schedule, plan, rank, power_at, latency_s) for rank in range(schedule.num_ranks)]
    finished, now = set(), 0.0
    while not all(rank.done for rank in ranks):
        ended = [inst for rank in ranks if (inst := rank.tick(now, tick_s, finished))]
        now += tick_s
        on_the_way += [(now + profile.transfer_s(inst.stage, inst.type), inst) for inst in ended]
        finished.update(inst for arrival, inst in on_the_way if arrival <= now + 1e-12)
        on_the_way = [(arrival, inst) for arrival, inst in on_the_way if arrival > now + 1e-12]
    return now, ranks


class Rank:
    def __init__(self, profile, schedule, plan, rank, power_at, latency_s):
        self.profile, self.power_at, self.latency_s = profile, power_at, latency_s
        self.order, self.row = schedule.orders[rank], plan.clocks_mhz[rank]
        self.waits = {wait.position: wait for wait in plan.wait_clocks if wait.rank == rank}
        self.last_stage = schedule.num_stages - 1
        self.clock, self.pending, self.agenda = self.row[0], [], []
        self.asked = []  # when, for a clock that had not been asked for last
        self.last_asked = self.row[0]
        self.position, self.progress, self.computing, self.energy = 0, 0.0, False, 0.0
        self.begin_wait(0.0)

    @property
    def done(self):
        return self.position == len(self.order)

    def ask(self, now, clock):
        latency_s = self.latency_s(self.last_asked, clock) if callable(self.latency_s) else self.latency_s
        lands = max([now + latency_s, *(time for time, _ in self.pending)])
        self.pending.append((lands, clock))
        if clock != self.last_asked:
            self.asked.append(now)
            self.last_asked = clock

    def begin_wait(self, now):
        wait = self.waits.get(self.position)
        following = self.row[0] if self.done else self.row[self.position]
        if wait is None:
            self.ask(now, following)
        else:
            self.ask(now, wait.clock_mhz)
            self.agenda = [] if self.done else [(now + wait.hold_s, following)]

    def tick(self, now, tick_s, finished):
        while self.agenda and self.agenda[0][0] <= now + 1e-12:
            self.ask(now, self.agenda.pop(0)[1])
        while self.pending and self.pending[0][0] <= now + 1e-12:
            self.clock = self.pending.pop(0)[1]
        if not self.computing and not self.done and self.needs() <= finished:
            self.computing, self.progress = True, 0.0
            while self.agenda:
                self.ask(now, self.agenda.pop(0)[1])
        if not self.computing:
            self.energy += self.power_at(self.clock) * tick_s
            return None
        inst = self.order[self.position]
        time, energy = self.cost(inst)
        self.progress += tick_s / time
        self.energy += energy * tick_s / time
        if self.progress < 1 - 1e-9:
            return None
        self.computing = False
        self.position += 1
        self.asked_within = list(self.asked)  # what is asked for at the end of the last one is for the next iteration
        self.begin_wait(now + tick_s)
        return inst

    def needs(self):
        inst = self.order[self.position]
        stage = inst.stage + (-1 if inst.type is F else 1)
        return {Instruction(stage, inst.type, inst.microbatch)} if 0 <= stage <= self.last_stage else set()

    def cost(self, inst):
        measured = self.profile.instructions[inst.stage, inst.type]
        points = dict(zip(measured.clocks_mhz, zip(measured.times_s, measured.energies_j, strict=True), strict=True))
        clock = min(max(self.clock, min(points)), max(points))
        if clock in points:
            return points[clock]
        low, high = max(c for c in points if c < clock), min(c for c in points if c > clock)
        share = (clock - low) / (high - low)
        return tuple(share * b + (1 - share) * a for a, b in zip(points[low], points[high], strict=True))
