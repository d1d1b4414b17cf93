"""One simulated engine: continuous batching with chunked prefill over a block pool.

A run of steps in which nothing changes but the length of the contexts is one event, however many
steps it has: that is what makes a simulation of long answers cheap.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from functools import partial
from typing import Protocol

from kvxfer.serving.sim.blocks import BlockPool
from kvxfer.serving.sim.clock import Clock
from kvxfer.serving.sim.fleet import EngineSpec, Role
from kvxfer.serving.sim.network import Port
from kvxfer.serving.sim.steps import StepTimes
from kvxfer.serving.sim.task import Hold, Task

RECENT_SECONDS = 2.0
"""How far back `Engine.itl_seconds` looks, as an exponential average."""


class Listener(Protocol):
    """Whom an engine tells."""

    def prefill_started(self, task: Task) -> None:
        """A prefill engine has given memory to a task."""

    def prefilled(self, task: Task) -> None:
        """The whole prompt has been computed."""

    def reserved(self, task: Task) -> None:
        """A decode engine has set memory aside for KV that is to be sent."""

    def finished(self, task: Task) -> None:
        """The last token is out and the memory released."""


class Engine:
    """The state of one engine. Times are the clock's."""

    def __init__(
        self,
        spec: EngineSpec,
        name: str,
        block_ids_tokens: int,
        port_rate: float,
        clock: Clock,
        listener: Listener,
        gaps: StepTimes,
    ) -> None:
        self.spec = spec
        self.name = name
        self.ids_tokens = block_ids_tokens
        block = spec.block_tokens
        self.pool = BlockPool(
            spec.kv_tokens // block, max(1, block_ids_tokens // block), spec.prefix_cache
        )
        self.port = Port(port_rate)
        self.waiting: deque[Task] = deque()
        self.prefilling: list[Task] = []
        self.ready: deque[Task] = deque()
        self.running: dict[Task, None] = {}
        self.inflight_tokens = 0
        """Uncached tokens given to it to prefill, and not yet prefilled."""
        self.assigned_tokens = 0
        """Prompts of tasks that will decode here and hold no memory here yet."""
        self.busy = 0.0
        self.tokens_out = 0
        self.tokens_prefilled = 0
        self._clock = clock
        self._listener = listener
        self._gaps = gaps
        self._step = 0
        self._context = 0
        self._phases = [0] * block
        self._finish: list[tuple[int, int, Task]] = []
        self._joined = 0
        self._recent_gap = 0.0
        self._fresh: list[Task] = []
        self._version = 0
        self._stepping = False
        self._run_start = 0.0
        self._run_steps = 0  # of a run of pure decode steps; 0 while a step prefills
        self._run_first = 0.0
        self._run_slope = 0.0

    # What a router asks.

    @property
    def kv_used(self) -> float:
        """Fraction of the blocks that are pinned."""
        return self.pool.pinned / self.pool.capacity

    @property
    def load(self) -> float:
        """Tokens pinned, promised or waiting, as a fraction of its memory."""
        pinned = self.pool.pinned * self.spec.block_tokens
        return (pinned + self.assigned_tokens + self.inflight_tokens) / self.spec.kv_tokens

    @property
    def step_seconds(self) -> float:
        """A decode step at the present load; 0 while nothing runs."""
        running = len(self.running)
        return self.spec.decode.step(running, self._context) if running else 0.0

    @property
    def itl_seconds(self) -> float:
        """Time between tokens over the last few seconds; 0 while nothing runs."""
        return self._recent_gap if self.running else 0.0

    def cached_tokens(self, task: Task) -> int:
        """Return how much of the prompt need not be computed here."""
        if not task.job.blocks or not self.spec.prefix_cache:
            return 0
        hit = self.pool.match(task.job.blocks) * self.ids_tokens
        return min(hit, task.job.prompt_tokens - 1)  # the last token is always computed

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens could run here at all."""
        block = self.spec.block_tokens
        return -(-tokens // block) + 1 <= self.pool.capacity

    # What the simulation tells it.

    def enqueue(self, task: Task) -> None:
        """Take a task that is to be prefilled here, or wants memory for KV from elsewhere."""
        self.waiting.append(task)
        self._poke()

    def kv_arrived(self, task: Task) -> None:
        """All KV of a task for which memory was reserved is here."""
        self.ready.append(task)
        self._poke()

    def release_prefill(self, task: Task) -> None:
        """Free what a prefill engine kept until the KV was sent."""
        assert task.prefill_hold is not None
        self._release(task.prefill_hold)
        task.prefill_hold = None
        self._poke()

    # Steps.

    def _poke(self) -> None:
        if not self._stepping:
            # After all else that happens at this moment, so that it can share the step.
            self._stepping = True
            self._clock.at(self._clock.now, self._plan)
        elif self._run_steps > 1 and len(self.running) < self.spec.max_sequences:
            self._cut_run()

    def _plan(self) -> None:
        """Start what comes next. What is told here may enqueue here again."""
        preempted = self._make_room()
        while self.ready and self._slots:
            self._join(self.ready.popleft())
            preempted |= self._make_room()
        # What was preempted would take its memory back, and be preempted by the next step.
        if not (preempted and (self.running or self.prefilling)):
            self._admit()
        if self.prefilling:
            self._start_mixed_step()
        elif self.running:
            self._start_run()
        else:
            self._stepping = False

    @property
    def _slots(self) -> int:
        return self.spec.max_sequences - len(self.running) - len(self.prefilling)

    def _make_room(self) -> bool:
        """Preempt the youngest until the rest can take a step; they are computed anew later."""
        preempted = False
        while self.running and self._growth(1) > self.pool.free:
            task = next(reversed(self.running))
            self._leave(task)
            task.preemptions += 1
            task.awaits_kv = False
            task.to_prefill = task.job.prompt_tokens + task.produced
            self.inflight_tokens += task.to_prefill
            self.waiting.appendleft(task)
            preempted = True
        return preempted

    def _admit(self) -> None:
        waiting = self.waiting
        spare = self._growth(1)
        while waiting:
            task = waiting[0]
            if not (task.awaits_kv or self._slots):
                break
            tokens = task.job.prompt_tokens + task.produced
            hold = self._acquire(task, tokens, spare)
            if hold is None:
                break
            waiting.popleft()
            if task.awaits_kv:
                task.kv_hold = hold
                self.assigned_tokens -= task.job.prompt_tokens
                self._listener.reserved(task)
                continue
            self.inflight_tokens += tokens - hold.cached - task.to_prefill
            task.to_prefill = tokens - hold.cached
            self.prefilling.append(task)
            if self.spec.role is Role.PREFILL:
                task.prefill_hold = hold
                self._listener.prefill_started(task)
            else:
                task.kv_hold = hold
                if not task.preemptions:
                    self.assigned_tokens -= task.job.prompt_tokens

    def _acquire(self, task: Task, tokens: int, spare: int) -> Hold | None:
        ids = task.job.blocks
        private = -(-(tokens - len(ids) * self.ids_tokens) // self.spec.block_tokens)
        cached = self.cached_tokens(task)
        if not self.pool.acquire(ids, private, spare):
            return None
        return Hold(ids, private, cached)

    def _join(self, task: Task, context: int | None = None) -> None:
        """Let a task of which `context` tokens are in memory decode from the next step on."""
        step = self._step
        if context is None:
            context = task.job.prompt_tokens
        task.joined_step, task.start_context = step, context
        task.finish_step = step + task.job.output_tokens - task.produced
        self.running[task] = None
        self._context += context
        self._phases[(step - context) % self.spec.block_tokens] += 1
        self._joined += 1
        heapq.heappush(self._finish, (task.finish_step, self._joined, task))
        if task.first < 0:
            self._fresh.append(task)

    def _leave(self, task: Task) -> None:
        """Take a task out of the batch and free its memory."""
        block = self.spec.block_tokens
        steps = self._step - task.joined_step
        context = task.start_context + steps
        task.produced += steps
        del self.running[task]
        self._context -= context
        self._phases[(task.joined_step - task.start_context) % block] -= 1
        hold = task.kv_hold
        assert hold is not None
        hold.private += -(-context // block) - -(-task.start_context // block)
        self._release(hold)
        task.kv_hold = None

    def _release(self, hold: Hold) -> None:
        self.pool.release(hold.ids, hold.private)

    def _growth(self, steps: int) -> int:
        """Return the blocks that the running sequences need for so many more steps."""
        phases, block, step = self._phases, self.spec.block_tokens, self._step
        rounds, rest = divmod(steps, block)
        need = rounds * len(self.running)
        for offset in range(rest):
            need += phases[(step + offset) % block]
        return need

    def _begin(self, first_step: float) -> None:
        """Note when tasks that take part for the first time have their first token."""
        if self._fresh:
            when = self._clock.now + first_step
            for task in self._fresh:
                if task.first < 0 and task in self.running:
                    task.first = when
            self._fresh.clear()

    def _start_mixed_step(self) -> None:
        spec, running = self.spec, len(self.running)
        budget = spec.batch_tokens - running
        seconds = spec.prefill.base
        if running:
            seconds = max(seconds, spec.decode.step(running, self._context))
            if spec.chunk_tokens is not None:
                budget = min(budget, spec.chunk_tokens)
        computed = complete = 0
        for task in self.prefilling:
            if budget <= 0:
                break
            tokens = min(budget, task.to_prefill)
            start = task.job.prompt_tokens + task.produced - task.to_prefill
            seconds += spec.prefill.chunk(start, tokens)
            task.to_prefill -= tokens
            budget -= tokens
            computed += tokens
            complete += not task.to_prefill
        self._begin(seconds)
        ended = partial(self._mixed_step_ended, seconds, computed, complete)
        self._clock.at(self._clock.now + seconds, ended)

    def _mixed_step_ended(self, seconds: float, computed: int, complete: int) -> None:
        self.busy += seconds
        self.inflight_tokens -= computed
        self.tokens_prefilled += computed
        if self.running:
            self._note_gap(seconds, 1)
            self._advance(1)
        completed, self.prefilling = self.prefilling[:complete], self.prefilling[complete:]
        for task in completed:
            if self.spec.role is Role.PREFILL:
                self._listener.prefilled(task)
            else:
                self._emit(task)
        self._plan()

    def _note_gap(self, seconds: float, steps: int) -> None:
        self._gaps.add(seconds, len(self.running) * steps)
        kept = math.exp(-seconds * steps / RECENT_SECONDS)
        self._recent_gap = kept * self._recent_gap + (1 - kept) * seconds

    def _emit(self, task: Task) -> None:
        """The step that completes a prompt yields a token."""
        context = task.job.prompt_tokens + task.produced
        task.produced += 1
        self.tokens_out += 1
        if task.first < 0:
            task.first = self._clock.now
        if task.produced < task.job.output_tokens:
            self._join(task, context)
        else:
            assert task.kv_hold is not None
            self._release(task.kv_hold)
            task.kv_hold = None
            self._listener.finished(task)

    def _start_run(self) -> None:
        """Start as many steps as nothing is bound to change in."""
        decode, running = self.spec.decode, len(self.running)
        self._run_first = decode.step(running, self._context)
        self._run_slope = decode.per_context * running
        finish = self._finish
        while finish[0][2] not in self.running or finish[0][0] != finish[0][2].finish_step:
            heapq.heappop(finish)
        steps = finish[0][0] - self._step
        if self._growth(steps) > self.pool.free:
            steps = self._affordable(steps)
        self._run_start = self._clock.now
        self._begin(self._run_first)
        self._run(steps)

    def _affordable(self, most: int) -> int:
        """Return for how many steps there is memory: at least 1, `_make_room` saw to that."""
        fewest = 1
        while most - fewest > 1:
            middle = (fewest + most) // 2
            if self._growth(middle) <= self.pool.free:
                fewest = middle
            else:
                most = middle
        return fewest

    def _run_seconds(self, steps: int) -> float:
        return self._run_first * steps + self._run_slope * (steps * (steps - 1) / 2)

    def _run(self, steps: int) -> None:
        self._run_steps = steps
        self._version += 1
        ended = partial(self._run_ended, self._version)
        self._clock.at(self._run_start + self._run_seconds(steps), ended)

    def _cut_run(self) -> None:
        """End the run of decode steps with the step that is under way."""
        passed = self._clock.now - self._run_start
        first, slope = self._run_first, self._run_slope
        if slope > 0:
            half = first - slope / 2
            steps = (math.sqrt(half * half + 2 * slope * passed) - half) / slope
        else:
            steps = passed / first
        done = max(1, math.ceil(steps - 1e-9))
        if self._run_start + self._run_seconds(done) < self._clock.now:
            done += 1  # rounding put the end of the step into the past
        if done < self._run_steps:
            self._run(done)

    def _run_ended(self, version: int) -> None:
        if version != self._version:
            return
        steps, self._run_steps = self._run_steps, 0
        seconds = self._run_seconds(steps)
        self.busy += seconds
        self._note_gap(seconds / steps, steps)
        self._advance(steps)
        self._plan()

    def _advance(self, steps: int) -> None:
        """Every running sequence has got `steps` tokens more."""
        running = len(self.running)
        self.pool.grow(self._growth(steps))
        self._step += steps
        self._context += running * steps
        self.tokens_out += running * steps
        finish = self._finish
        while finish and finish[0][0] <= self._step:
            step, _, task = heapq.heappop(finish)
            if task in self.running and task.finish_step == step:
                self._leave(task)
                self._listener.finished(task)
