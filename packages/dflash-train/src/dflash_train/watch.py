"""Watching compilation and speed: what happens once is the start, what happens again is an alarm."""

import importlib
import importlib.util
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._dynamo.config
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import CompilationMetrics, get_compilation_metrics

from dflash_train.situation import Situation

SAMPLE_SECONDS = 0.5
STALL_SECONDS = 30.0
LASTING = 3  # intervals below half of the best speed
WARM_UP = 2  # intervals that set no best


@dataclass(frozen=True)
class Compilations:
    """Since the last look: how many, the seconds they took, and of those that should not have been why."""

    count: int
    seconds: float
    reasons: list[str]


class CompileWatch:
    """Counts what torch.compile does in this process.

    Args:
        report: takes the alarms that cannot wait for a log line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._seen_us = report, _latest_us(get_compilation_metrics())
        self._settled_us, self._main = float("inf"), threading.main_thread().ident
        self._began, self._seconds, self._depth = 0.0, 0.0, 0
        callback_handler.register_start_callback(self._started)
        callback_handler.register_end_callback(self._ended)
        if torch._dynamo.config.force_compile_during_fx_trace:
            report(
                "torch._dynamo.config.force_compile_during_fx_trace is on; it hides races and costs speed: turn it off"
            )

    def settle(self) -> None:
        """The first step is through: from now on a compilation is news."""
        self._settled_us = time.time_ns() / 1e3

    def take(self) -> Compilations:
        """What was compiled since the last call."""
        records = get_compilation_metrics()  # the last 64 of them
        new = [record for record in records if (record.start_time_us or 0) > self._seen_us]
        self._seen_us = max(self._seen_us, _latest_us(records))
        seconds, self._seconds = self._seconds, 0.0
        again = [record for record in new if (record.start_time_us or 0) > self._settled_us]
        reasons = [
            f"{record.co_name} ({record.co_filename}:{record.co_firstlineno}):"
            f" {' '.join(str(record.recompile_reason or 'compiled for the first time').split())[:300]}"
            for record in again
        ]
        return Compilations(len(new), seconds, reasons)

    def close(self) -> None:
        """Stop watching."""
        callback_handler.remove_start_callback(self._started)
        callback_handler.remove_end_callback(self._ended)

    def _is_foreign(self) -> bool:
        """Whether a thread of Python's compiles that is not the main one.

        Autograd's own threads compile the backward graphs of a device; the main thread waits for them.
        """
        thread = threading.current_thread()
        return thread.ident != self._main and not isinstance(thread, threading._DummyThread)

    def _started(self, _: CallbackArgs) -> None:
        if self._is_foreign():
            self._report(f"thread {threading.current_thread().name} compiles; only the main thread may")
            return
        self._depth += 1
        if self._depth == 1:
            self._began = time.perf_counter()

    def _ended(self, _: CallbackArgs) -> None:
        if self._is_foreign():
            return
        self._depth -= 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._began


def _latest_us(records: list[CompilationMetrics]) -> int:
    return max((record.start_time_us or 0 for record in records), default=0)


class DeviceWatch:
    """How busy this rank's GPU is, sampled by the driver (NVML) on a thread of its own.

    Without a GPU or the driver's Python interface it knows nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum, self._count = 0.0, 0
        self.latest = -1.0  # share at the last sample
        if device.type == "cuda" and importlib.util.find_spec("pynvml") is not None:
            threading.Thread(target=self._sample, args=(device,), name="device-watch", daemon=True).start()

    def take(self) -> float:
        """Share of the time since the last call with a kernel running; -1 if unknown."""
        mean = self._sum / self._count if self._count else -1.0
        self._sum, self._count = 0.0, 0
        return mean

    def _sample(self, device: torch.device) -> None:
        nvml_error = importlib.import_module("pynvml").NVMLError
        while True:
            try:
                self.latest = torch.cuda.utilization(device) / 100
            except (nvml_error, RuntimeError):  # not permitted, a part of a GPU, a lost one: not known any more
                self.latest = -1.0
                return
            self._sum, self._count = self._sum + self.latest, self._count + 1
            time.sleep(SAMPLE_SECONDS)


class StallWatch:
    """Says what a rank is at when it has not moved on for long, and which ranks here are gone or stopped.

    The main thread then waits in a collective or for a pack and can say nothing; the channel's timeout, which ends the
    job, is much longer.

    Saving is left out: it may take its time, and has errors of its own.

    Args:
        situation: of this rank.
        timeout_s: the channel's; half of it is the longest that a standstill goes unnoticed.
        report: takes the alarm, once a standstill.
        only_if: report only if this rank is gone or stopped; the one that reports everything else.
    """

    def __init__(
        self, situation: Situation, timeout_s: float, report: Callable[[str], None], only_if: int | None = None
    ) -> None:
        self._situation, self._report, self._closed = situation, report, threading.Event()
        self._only_if = only_if
        self._most_s = timeout_s / 2
        threading.Thread(target=self._watch, name="stall-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _concerns(self) -> bool:
        return self._only_if is None or any(
            peer.rank == self._only_if and peer.condition() for peer in self._situation.peers
        )

    def _watch(self) -> None:
        began, longest, told = self._situation.since, 0.0, False  # longest: of what came to an end
        looked = time.monotonic()
        while not self._closed.wait(STALL_SECONDS / 10):
            asleep, looked = time.monotonic() - looked, time.monotonic()
            since, doing = self._situation.since, self._situation.doing
            if asleep > STALL_SECONDS / 2:  # this process was stopped: nobody else is to blame
                self._report(f"this rank itself was stopped for {asleep:.0f} s, {doing}")
                began, told = since, True
                continue
            if since != began:
                longest = longest if told else max(longest, since - began)
                began, told = since, False
            age = time.monotonic() - since
            limit = min(max(STALL_SECONDS, 3 * longest), self._most_s)
            if age > limit and not told and not doing.startswith("saving") and self._concerns():
                told = True
                missing = "; ".join(self._situation.missing()) or "no rank on this host is gone or stopped"
                self._report(f"no progress for {age:.0f} s, {doing}: {missing}")


class SpeedWatch:
    """Notices that the job has become slower than it was, or than it should be.

    Args:
        expected_tokens_s: what is expected, if anything.
    """

    def __init__(self, expected_tokens_s: float | None) -> None:
        self._expected, self._best, self._account = expected_tokens_s, 0.0, ""
        self._slow, self._intervals = 0, 0

    def add(self, tokens_s: float, account: str) -> str | None:
        """An interval's speed and account; returns an alarm once when it has been below half for a while."""
        self._intervals += 1
        if self._intervals <= WARM_UP:
            return None
        if tokens_s > self._best:
            self._best, self._account = tokens_s, account
        limit = max(self._best, self._expected or 0.0) / 2
        self._slow = self._slow + 1 if tokens_s < limit else 0
        if self._slow != LASTING:
            return None
        whose = "this run's best" if self._best >= (self._expected or 0.0) else "trainer.expected_ktok_s"
        return (
            f"{tokens_s / 1e3:.2f} ktok/s for {LASTING} log intervals is less than half of {whose}"
            f" ({2 * limit / 1e3:.2f}); then: {self._account or 'no account'}; now: {account}"
        )
