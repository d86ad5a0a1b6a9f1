"""Attempt after attempt of a job, until it is done or has failed too often."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

from tfdist.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_WRONG_USE
from tfdist.launch.attempt import Job, Outcome, run_attempt
from tfdist.launch.failure import EventLog, Failure
from tfdist.launch.health import HealthCheck
from tfdist.launch.output import Screen
from tfdist.launch.policy import Places, RestartBudget
from tfdist.launch.signals import CaughtSignals
from tfdist.liveness import Monitor

_TICK_S = 0.05


class Restarts:
    """Runs attempt after attempt, and tells of each failure.

    Args:
        job: What to run.
        budget: How often it may be started again.
        places: Where its workers run.
        health: Says whether a place is well.
        screen: Where messages go.
        logs: A file for each worker's output.
        caught: The signals sent to this process.
        events: Gets failures and restarts, for programs.
    """

    def __init__(
        self,
        job: Job,
        budget: RestartBudget,
        places: Places,
        health: HealthCheck,
        screen: Screen,
        logs: "Sequence[BinaryIO] | None",
        caught: CaughtSignals,
        events: EventLog,
    ) -> None:
        self._job = job
        self._budget = budget
        self._places = places
        self._health = health
        self._grows = False
        self._attempts = 0
        self._can_go_on = True
        self._screen = screen
        self._logs = logs
        self._caught = caught
        self._events = events
        self._last: Outcome | None = None
        self._began = self._attempt_began = time.monotonic()
        self._lost_s = self._told_lost_s = 0.0
        self._repeated = 0

    def run(self) -> int:
        """Returns the exit code of the job."""
        while True:
            if number := self._wait(self._ask_places()):
                return self._interrupted(number)
            active = self._places.active
            outcome = self._attempt(active)
            self._can_go_on = outcome.can_go_on
            if outcome.asked_to_stop and self._grows and outcome.interrupted_by is None and outcome.failure is None:
                continue
            failure, number = outcome.failure, outcome.interrupted_by
            if failure is None:
                self._sum_up()
                if outcome.asked_to_stop:
                    return EXIT_REQUEUE
                return EXIT_DONE if number is None else self._interrupted(number)
            if number is None:
                number = next(iter(self._caught.take()), None)  # one that came with the end of the last worker
            progress = self._budget.progressed(failure.step)
            wait_s = None
            if not failure.for_good:
                wait_s = self._budget.wait_s(time.monotonic())
            self._tell(failure, restarts=wait_s is not None and number is None)
            by_signal = number is not None and failure.code == -number  # that it was sent to all at once
            if number is not None and (wait_s is not None or by_signal) and not outcome.failed_to_stop:
                return self._interrupted(number)
            if number is not None or wait_s is None:
                return EXIT_WRONG_USE if failure.code == EXIT_WRONG_USE else EXIT_FAILED
            if self._places.failed(active[failure.worker], time.monotonic(), progress=progress):
                self._note(f"place {active[failure.worker]} has failed twice in a row, and is left out for a while")
            until = outcome.at + wait_s
            if number := self._wait(lambda until=until: time.monotonic() >= until):
                return self._interrupted(number)
            self._last = outcome
            self._lost_s += time.monotonic() - outcome.at

    def _attempt(self, active: Sequence[int]) -> Outcome:
        self._attempt_began = time.monotonic()
        self._grows = False
        number, self._attempts = self._attempts, self._attempts + 1
        return run_attempt(
            self._job,
            number,
            self._budget.total,
            self._lost_s,
            self._screen,
            self._logs,
            self._caught,
            places=active,
            on_training=self._trains,
            on_tick=self._look_for_places,
        )

    def _interrupted(self, number: int) -> int:
        """Returns the exit code of a job that a signal to this process has ended."""
        return EXIT_REQUEUE if number == signal.SIGTERM and self._can_go_on else 128 + number

    def _ask_places(self) -> Callable[[], bool]:
        """Returns a function that says whether all places have been looked at; it leaves out those not well."""
        unknown = set(self._places.active)

        def known() -> bool:
            for place in sorted(unknown):
                well = self._health.look(place)
                if well is None:
                    continue
                unknown.remove(place)
                if not well and self._places.unwell(place, time.monotonic()):
                    self._note(f"place {place} is not well (--health_check), and is left out for a while")
            return not unknown

        return known

    def _look_for_places(self, monitor: Monitor) -> None:
        """Lets the job stop, to be started with more workers, when a place that was left out is well again."""
        for place in self._places.due(time.monotonic()):
            well = self._health.look(place)
            if well and monitor.ask_to_stop(f"place {place} is back"):
                self._places.back(place)
                self._grows = True
            elif well is not None:
                self._places.unwell(place, time.monotonic())  # or cannot be used now: later again

    def _tell(self, failure: Failure, *, restarts: bool) -> None:
        """Prints the failing worker's last lines, and what comes next; the last thing printed is what matters most."""
        log = f" (all of it: {self._logs[failure.worker].name})" if self._logs else ""
        printed = "Its last lines" if failure.last_lines else "It printed nothing"
        self._note(f"{failure.headline}. {printed}{log}{':' if failure.last_lines else '.'}")
        for line in failure.last_lines:
            self._screen.line(failure.worker, line.encode())
        self._events.append({**failure.as_event(), "restarts": restarts})
        if failure.for_good and self._budget.policy.max_restarts:
            self._note("not started again: it would fail in the same way")
        if not restarts:
            return
        for worker, how in failure.others.items():
            self._note(f"worker {worker} then ended, {how}")
        policy = self._budget.policy
        ports = "new ports" if self._job.start_port is None else "the same ports"
        self._note(
            f"restart {self._budget.total} of the job, on {ports} (without progress: {self._budget.spent} of "
            f"{policy.max_restarts} within {policy.window_s:g} s)"
        )

    def _trains(self, step: int) -> None:
        """Is told that training has begun, at `step`."""
        if self._last is None:
            return
        failure, lost_s = self._last.failure, time.monotonic() - self._last.at
        self._last = None
        repeated = max(0, (failure.step or 0) - step)
        self._repeated += repeated
        self._told_lost_s += lost_s
        self._note(f"training goes on from step {step}: {repeated} step(s) are repeated, {lost_s:.1f} s were lost")
        start_s = time.monotonic() - self._attempt_began
        seconds = {"lost_s": round(lost_s, 3), "start_s": round(start_s, 3)}
        self._events.append({"event": "resumed", "step": step, "repeated_steps": repeated, **seconds})

    def _sum_up(self) -> None:
        """Says what the failures have cost, at the end of a job that had some."""
        if self._budget.total:
            took_s = time.monotonic() - self._began
            self._note(
                f"{self._budget.total} restart(s): {self._repeated} step(s) were repeated, and until training went on "
                f"{self._told_lost_s:.1f} s of {took_s:.1f} s went by"
            )

    def _wait(self, over: Callable[[], bool]) -> "int | None":
        """Waits until it is over; returns the signal that ends the job meanwhile, if one does."""
        while not over():
            if caught := self._caught.take():
                return caught[0]
            time.sleep(_TICK_S)
        return None

    def _note(self, text: str) -> None:
        self._screen.note(f"tfdist launch: {text}".encode())
        self._screen.flush()
