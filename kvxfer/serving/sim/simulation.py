"""Runs a workload through a fleet."""

from __future__ import annotations

from functools import partial

from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least
from kvxfer.serving.decide import Place
from kvxfer.serving.sim.clock import Clock
from kvxfer.serving.sim.engine import Engine
from kvxfer.serving.sim.fleet import Fleet, Role
from kvxfer.serving.sim.network import Network
from kvxfer.serving.sim.results import EngineUse, Outcome, Result
from kvxfer.serving.sim.routing import Router, pick_decode, pick_prefill
from kvxfer.serving.sim.steps import StepTimes
from kvxfer.serving.sim.task import Task
from kvxfer.serving.workload import Workload


def simulate(
    fleet: Fleet, workload: Workload, router: Router, concurrency: int | None = None
) -> Result:
    """Return what happens when `workload` is sent to `fleet`.

    Without `concurrency` requests arrive at their times (an open loop). With it, so many clients
    send one request after the other, in the workload's order and whatever its times (a closed
    loop). The same arguments always give the same result; `router` may keep state, so pass a new
    one each time.
    """
    return _Simulation(fleet, workload, router).run(concurrency)


class _Simulation:
    """The engines, the network between them, and the requests under way."""

    def __init__(self, fleet: Fleet, workload: Workload, router: Router) -> None:
        self._fleet = fleet
        self._workload = workload
        self._router = router
        self._clock = Clock()
        self._network = Network(self._clock)
        self._gaps = StepTimes()
        self._engines = self._make_engines()
        self._prefill = [e for e in self._engines if e.spec.role is Role.PREFILL]
        self._decode = [e for e in self._engines if e.spec.role is not Role.PREFILL]
        self._tasks: list[Task] = []
        self._rejected: list[int] = []
        self._next = 0
        self._closed = False

    def _make_engines(self) -> list[Engine]:
        tokens = self._workload.block_tokens
        with_ids = any(job.blocks for job in self._workload.jobs)
        engines: list[Engine] = []
        for spec, count in self._fleet.engines:
            if with_ids and tokens % spec.block_tokens:
                raise InvalidError(
                    f"the workload's blocks of {tokens} tokens are no multiple of the engine's "
                    f"of {spec.block_tokens}"
                )
            rate = spec.link_bytes_per_second
            if rate is None:
                rate = self._fleet.link.bytes_per_second if self._fleet.link else 1.0
            for _ in range(count):
                name = f"{spec.role.value}{len(engines)}"
                engines.append(Engine(spec, name, tokens, rate, self._clock, self, self._gaps))
        return engines

    def run(self, concurrency: int | None) -> Result:
        if concurrency is None:
            self._clock.at(self._workload.jobs[0].time, self._arrive)
        else:
            at_least("concurrency", concurrency, 1)
            self._closed = True
            for _ in range(min(concurrency, len(self._workload.jobs))):
                self._clock.at(0.0, self._issue)
        self._clock.run()
        return self._result()

    def _arrive(self) -> None:
        jobs = self._workload.jobs
        while self._next < len(jobs) and jobs[self._next].time <= self._clock.now:
            self._issue()
        if self._next < len(jobs):
            self._clock.at(jobs[self._next].time, self._arrive)

    def _issue(self) -> None:
        """Send the next request, if there is one."""
        while self._next < len(self._workload.jobs):
            task = Task(self._next, self._workload.jobs[self._next], self._clock.now)
            self._next += 1
            if self._dispatch(task):
                self._tasks.append(task)
                return
            self._rejected.append(task.index)
            if not self._closed:
                return

    def _dispatch(self, task: Task) -> bool:
        job = task.job
        able = [e for e in self._decode if e.fits(job.prompt_tokens + job.output_tokens)]
        if not able:
            return False
        decode = pick_decode(task, able)
        prefill = [e for e in self._prefill if e.fits(job.prompt_tokens)]
        best = pick_prefill(task, prefill)
        task.decision = self._router(task, prefill, best, decode, self._clock.now)
        task.decode = decode
        decode.assigned_tokens += job.prompt_tokens
        if task.decision.place is Place.REMOTE and best is not None:
            task.prefill = best
            task.awaits_kv = False
            where = best
        else:
            where = decode
        task.to_prefill = job.prompt_tokens - where.cached_tokens(task)
        where.inflight_tokens += task.to_prefill
        where.enqueue(task)
        return True

    # What engines tell.

    def prefill_started(self, task: Task) -> None:
        """See `Listener`. Where layers overlap, KV is on its way as soon as there is some."""
        assert self._fleet.link is not None
        if self._fleet.link.layers > 1 and not self._ends_at_prefill(task):
            self._reserve(task)

    def _ends_at_prefill(self, task: Task) -> bool:
        return self._fleet.first_token_at_prefill and task.job.output_tokens == 1

    def prefilled(self, task: Task) -> None:
        """See `Listener`."""
        assert task.prefill is not None
        task.prefill_done = True
        if self._fleet.first_token_at_prefill:
            task.first = self._clock.now
            task.produced = 1
            task.prefill.tokens_out += 1
        if self._ends_at_prefill(task):
            assert task.decode is not None
            task.decode.assigned_tokens -= task.job.prompt_tokens
            task.prefill.release_prefill(task)
            self.finished(task)
            return
        if not task.awaits_kv:
            self._reserve(task)
        elif task.flow is not None and task.tail:
            self._network.extend(task.flow, task.tail)
            task.tail = 0.0
        elif task.kv_hold is not None:
            self._send_tail(task)

    def _reserve(self, task: Task) -> None:
        assert task.decode is not None
        task.awaits_kv = True
        task.decode.enqueue(task)

    def reserved(self, task: Task) -> None:
        """See `Listener`."""
        link, hold = self._fleet.link, task.kv_hold
        assert link is not None
        assert hold is not None
        size = (task.job.prompt_tokens - hold.cached) * link.kv_bytes_per_token
        if not task.prefill_done:
            task.tail = size / link.layers
        self._send(task, size - task.tail)

    def _send(self, task: Task, size: float) -> None:
        assert task.prefill is not None
        assert task.decode is not None
        task.flow = self._network.start(
            task.prefill.port, task.decode.port, size, partial(self._sent, task)
        )

    def _send_tail(self, task: Task) -> None:
        tail, task.tail = task.tail, 0.0
        self._send(task, tail)

    def _sent(self, task: Task) -> None:
        task.flow = None
        if not task.prefill_done:
            return
        if task.tail:
            self._send_tail(task)
            return
        assert self._fleet.link is not None
        self._clock.at(self._clock.now + self._fleet.link.latency, partial(self._kv_there, task))

    def _kv_there(self, task: Task) -> None:
        assert task.prefill is not None
        assert task.decode is not None
        task.prefill.release_prefill(task)
        task.decode.kv_arrived(task)

    def finished(self, task: Task) -> None:
        """See `Listener`."""
        task.last = self._clock.now
        task.finished = True
        if self._closed:
            self._issue()

    def _result(self) -> Result:
        stuck = [task.index for task in self._tasks if not task.finished]
        assert not stuck, f"requests {stuck[:10]} never finished"
        outcomes = []
        for task in self._tasks:
            decision = task.decision
            assert decision is not None
            outcomes.append(
                Outcome(
                    task.index,
                    task.arrived,
                    task.first,
                    task.last,
                    task.job.prompt_tokens,
                    task.job.output_tokens,
                    decision.place,
                    decision.reason,
                    decision.uncached,
                    task.preemptions,
                )
            )
        if not outcomes:
            raise InvalidError(
                "no engine has the memory for any of the requests; the largest decode engine "
                f"holds {max(engine.spec.kv_tokens for engine in self._decode)} tokens"
            )
        uses = tuple(
            EngineUse(e.name, e.busy, e.tokens_prefilled, e.tokens_out, e.pool.pinned)
            for e in self._engines
        )
        seconds = max(outcome.last for outcome in outcomes) - outcomes[0].arrived
        return Result(
            self._fleet,
            tuple(outcomes),
            tuple(self._rejected),
            uses,
            self._gaps,
            self._network.bytes_moved,
            seconds,
        )
