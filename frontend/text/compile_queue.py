"""Grammars that wait to be compiled, in a queue for each tenant: many of one delay no other much."""

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from atom.shared.messages.grammar import CompiledGrammar
from frontend.errors import OverloadedError
from frontend.text.constraint import Constraint
from frontend.text.grammar_process import Compilation

__all__ = ["CompileJob", "CompileQueue"]

_MAX_JOBS = 128
_MAX_OF_TENANT = 64
_RETRY_AFTER_S = 5


@dataclass(eq=False)
class CompileJob:
    """One source that requests wait for."""

    constraint: Constraint
    result: "asyncio.Future[CompiledGrammar]"
    waiting: Counter[str] = field(default_factory=Counter)
    """Requests that wait for it, by their tenants."""
    compilation: Compilation = field(default_factory=Compilation)
    is_started: bool = False


class CompileQueue:
    """The jobs that are waiting or compiled now; tenants take turns."""

    def __init__(self) -> None:
        self._jobs: dict[bytes, CompileJob] = {}  # by the key of the source
        self._turns: OrderedDict[str, dict[CompileJob, None]] = OrderedDict()  # tenants, the next one first
        self._num_of: Counter[str] = Counter()  # jobs that requests of a tenant wait for

    def __len__(self) -> int:
        """Jobs that requests wait for."""
        return len(self._jobs)

    def join(self, constraint: Constraint, tenant: str) -> CompileJob:
        """The job of this source, for which one more request of `tenant` waits. Raises OverloadedError."""
        job = self._jobs.get(constraint.key)
        is_new = job is None or not job.waiting[tenant]
        if is_new and self._num_of[tenant] >= _MAX_OF_TENANT:
            who = f"{self._num_of[tenant]} grammars of this API key"
            raise OverloadedError(f"{who} are waiting to be compiled; try again later", _RETRY_AFTER_S)
        if job is None:
            if len(self._jobs) >= _MAX_JOBS:
                raise OverloadedError(
                    f"{len(self._jobs)} grammars are waiting to be compiled; try again later", _RETRY_AFTER_S
                )
            job = CompileJob(constraint, asyncio.get_running_loop().create_future())
            self._jobs[constraint.key] = job
        if is_new:
            self._num_of[tenant] += 1
            if not job.is_started:
                self._turns.setdefault(tenant, {})[job] = None
        job.waiting[tenant] += 1
        return job

    def leave(self, job: CompileJob, tenant: str) -> None:
        """A request waits no longer. What no request waits for is not compiled, or its compilation killed."""
        job.waiting[tenant] -= 1
        if job.waiting[tenant]:
            return
        del job.waiting[tenant]
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        self._dequeue(job, tenant)
        if not job.waiting:
            self._forget(job)
            job.compilation.cancel()

    def next(self) -> CompileJob | None:
        """The job to start now, of the tenant whose turn it is; None without any that waits."""
        if not self._turns:
            return None
        tenant, jobs = next(iter(self._turns.items()))
        job = next(iter(jobs))
        job.is_started = True
        self._turns.move_to_end(tenant)
        for each in job.waiting:
            self._dequeue(job, each)
        return job

    def done(self, job: CompileJob) -> None:
        """Forget a job that has a result or has failed: later requests need another one."""
        self._forget(job)

    def _forget(self, job: CompileJob) -> None:
        if self._jobs.get(job.constraint.key) is job:
            del self._jobs[job.constraint.key]

    def _dequeue(self, job: CompileJob, tenant: str) -> None:
        if (jobs := self._turns.get(tenant)) is not None:
            jobs.pop(job, None)
            if not jobs:
                del self._turns[tenant]
