"""Where one thread's time goes."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

OTHER = "other"


class StageClock:
    """Every moment of the thread that uses it belongs to exactly one stage, so the stages add up to wall time.

    Stages may lie in each other; the inner one counts.
    """

    def __init__(self) -> None:
        self._stage, self._since = OTHER, time.perf_counter()
        self._sums: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge what passes inside to a stage."""
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def take(self) -> Counter[str]:
        """Seconds by stage since the last call."""
        self._switch(self._stage)
        sums, self._sums = self._sums, Counter()
        return sums

    def _switch(self, name: str) -> str:
        now = time.perf_counter()
        self._sums[self._stage] += now - self._since  # type: ignore[assignment] - seconds, not counts
        before, self._stage, self._since = self._stage, name, now
        return before
