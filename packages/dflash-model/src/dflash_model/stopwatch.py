"""Times of named parts of a loop, without making the device wait."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Stopwatch:
    """Wall time on the CPU, stream time by events on a GPU.

    On a GPU nothing is synchronised while measuring; reading waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[torch.cuda.Event | float, torch.cuda.Event | float]]] = defaultdict(list)

    def _now(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of a block to ``name``."""
        began = self._now()
        yield
        self._spans[name].append((began, self._now()))

    @property
    def names(self) -> list[str]:
        """What was measured, in the order of first use."""
        return list(self._spans)

    def seconds(self, name: str) -> float:
        """Total of a name."""
        return sum(_between(began, ended) for began, ended in self._spans[name])

    def since(self, name: str) -> float:
        """From the end of the last span of a name until now."""
        return _between(self._spans[name][-1][1], self._now())


def measured(watch: Stopwatch | None, name: str) -> AbstractContextManager[None]:
    """A block's time, if there is a stopwatch."""
    return nullcontext() if watch is None else watch.measure(name)


def _between(began: torch.cuda.Event | float, ended: torch.cuda.Event | float) -> float:
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
