"""The torchdata pipeline of one target rank: work items -> token packs -> packs with hidden states.

Collation runs in threads ahead of the target; the target itself runs on the thread that calls ``next``, which must be
the main one: nothing else may launch device work or compiled code.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchdata.nodes import BaseNode, ParallelMapper, Prefetcher

from dflash_data.clock import StageClock
from dflash_data.packs import STATS, Collator, TokenPack
from dflash_data.schedule import Schedule, WorkItem
from dflash_data.target import ShardedTarget


class WorkSource(BaseNode[WorkItem]):
    """The items of one target rank; its whole state is how many it has handed out."""

    POSITION_KEY = "position"

    def __init__(self, schedule: Schedule, rank: int, num_targets: int) -> None:
        super().__init__()
        self._schedule, self._rank, self._num_targets = schedule, rank, num_targets
        self._position = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Start at the beginning, or where a state stood."""
        super().reset(initial_state)
        self._position = initial_state[self.POSITION_KEY] if initial_state else 0

    def next(self) -> WorkItem:
        """The next item; StopIteration after the last round."""
        if self._position >= self._schedule.rounds(self._num_targets):
            raise StopIteration
        item = self._schedule.target_item(self._position, self._rank, self._num_targets)
        self._position += 1
        return item

    def get_state(self) -> dict[str, Any]:
        """One number."""
        return {self.POSITION_KEY: self._position}


class ReadyCount:
    """How many collated packs wait for the target: q_pre, as the status line shows it."""

    def __init__(self, collate: Collator) -> None:
        self._collate, self._lock, self.value = collate, threading.Lock(), 0

    def __call__(self, item: WorkItem) -> TokenPack:
        """Collate and count (runs in a worker thread)."""
        pack = self._collate(item)
        self.add(1)
        return pack

    def add(self, change: int) -> None:
        """Change the count."""
        with self._lock:
            self.value += change


@dataclass
class MadePack:
    """A token pack with its context features.

    Attributes:
        pack: the tokens.
        context_SE: tapped hidden states, on the target's device.
        stats: timings in seconds, queue depth and tokens, by the names in ``packs.STATS``; those of sending and
            agreeing, and how busy the device is (-1: unknown), are the caller's.
        device_span: on a GPU, events around the forward; ``forward_s`` is the time to launch it.
    """

    pack: TokenPack
    context_SE: Tensor
    stats: dict[str, float]
    device_span: tuple[torch.cuda.Event, torch.cuda.Event] | None


class TargetHiddenStates(BaseNode[MadePack]):
    """Runs the sharded target on each token pack, on the calling thread."""

    def __init__(
        self, source: BaseNode[TokenPack], ready: ReadyCount, target: ShardedTarget, clock: StageClock
    ) -> None:
        super().__init__()
        self._source, self._ready, self._target, self._clock = source, ready, target, clock

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Reset the source."""
        super().reset(initial_state)
        self._source.reset(initial_state)

    def next(self) -> MadePack:
        """Wait for a collated pack and run the target on it."""
        began = time.perf_counter()
        depth = self._ready.value
        with self._clock.stage("data"):
            pack = next(self._source)
        self._ready.add(-1)
        started = time.perf_counter()
        span = None
        if self._target.device.type == "cuda":
            span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            span[0].record()
        with self._clock.stage("forward"):
            context_SE = self._target(pack)
        if span is not None:
            span[1].record()
        stats = dict.fromkeys(STATS, 0.0) | {
            "busy": -1.0,
            "data_s": started - began,
            "forward_s": time.perf_counter() - started,
            "q_pre": float(depth),
            "document_tokens": float((pack.doc_S >= 0).sum()),
        }
        return MadePack(pack, context_SE, stats, span)

    def get_state(self) -> dict[str, Any]:
        """The source's state."""
        return self._source.state_dict()


def hidden_states(
    schedule: Schedule,
    collate: Collator,
    target: ShardedTarget,
    *,
    rank: int,
    num_targets: int,
    num_workers: int,
    prefetch: int,
    clock: StageClock,
) -> Iterator[MadePack]:
    """The whole pipeline of one target rank."""
    ready = ReadyCount(collate)
    node: BaseNode[Any] = WorkSource(schedule, rank, num_targets)
    node = ParallelMapper(node, ready, num_workers=num_workers, in_order=True, method="thread")
    node = Prefetcher(node, prefetch_factor=prefetch)
    last = TargetHiddenStates(node, ready, target, clock)
    last.reset()
    return iter(last)
