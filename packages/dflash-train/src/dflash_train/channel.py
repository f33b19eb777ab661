"""Packs with hidden states, from target ranks to drafter ranks.

Device to pinned host memory on a copy stream, over gloo to the drafter rank's pinned memory, and on a copy stream to
its device: one path for CPUs, for two ranks on one GPU, for PCIe, NVLink and several nodes, and it takes nothing from
the compute units.

There is no protocol. Source, destination, size and order of every message follow from the schedule, so the receiver
keeps ``depth`` receives posted, in order, into a ring of buffers: a posted receive is the credit, and a send completes
when it is taken. Both sides go through the job's sequence in ascending order and a receiver always has its lowest
missing item posted, so no cycle of waiting is possible.

Each side has one thread, the only one that touches the channel's process group. gloo's ``is_completed`` stays false
until ``wait``, and a ``wait`` that times out breaks the connection: so that thread waits, and nobody polls.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_data.packs import STATS, TOKEN_FIELDS, HiddenPack, PackLayout, staged
from dflash_data.pipeline import MadePack
from dflash_data.schedule import Schedule, Stream, WorkItem
from dflash_train.mesh import Split
from dflash_train.stop import Stop

POLL_SECONDS = 0.5


class ChannelError(RuntimeError):
    """A peer is gone, frozen or out of step; the message names rank, role and pack."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds a peer may be silent.

    Attributes:
        first: for items before ``settled``: loading, compiling and autotuning take their time.
        later: afterwards; longer than any pause of a healthy peer (a checkpoint).
        settled: index of the first item that is past the first step and what is buffered behind it.
    """

    first: float
    later: float
    settled: int

    def of(self, item: WorkItem) -> float:
        """The limit for one item."""
        return self.first if item.index < self.settled else self.later


class WaitClock:
    """Time a drafter rank cannot compute because it waits for packs.

    On a GPU the host may wait while the device still works on earlier packs, so there the gap is measured on the
    device's own stream, between events, and read when they have long completed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count what passes inside."""
        if self._device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        gap = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        gap[0].record()
        yield
        gap[1].record()
        self._gaps.append(gap)

    def take(self) -> float:
        """Seconds since the last call; waits for the device to have passed the last gap."""
        seconds, gaps = self._seconds, self._gaps
        self._seconds, self._gaps = 0.0, []
        if gaps:
            gaps[-1][1].synchronize()
        return seconds + sum(begun.elapsed_time(ended) for begun, ended in gaps) / 1e3


class Receiver(Protocol):
    """What a drafter rank sees of any channel."""

    waiting: WaitClock

    def receive(self) -> HiddenPack:
        """The next pack of this rank, in order."""

    def depth(self) -> int:
        """q_hs: packs that have arrived and wait."""

    def close(self) -> None:
        """Release threads and buffers after the last pack."""


def _host_buffer(layout: PackLayout, device: torch.device) -> Tensor:
    return torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


@dataclass
class _Outgoing:
    item: WorkItem
    buffer: Tensor
    copied: torch.cuda.Event | None
    device_span: tuple[torch.cuda.Event, torch.cuda.Event] | None


class SendingChannel:
    """The target rank's end: copies packs out and sends them to their drafter ranks."""

    def __init__(
        self, layout: PackLayout, split: Split, group: dist.ProcessGroup, *, device: torch.device, timeouts: Timeouts,
        stop: Stop,
    ) -> None:  # fmt: skip
        self._layout, self._split, self._group, self._device = layout, split, group, device
        self._timeouts, self._stop = timeouts, stop
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: queue.Queue[Tensor] = queue.Queue()
        for _ in range(2):  # one being filled while the other is sent
            self._free.put(_host_buffer(layout, device))
        self._outgoing: queue.Queue[_Outgoing | None] = queue.Queue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="channel-send", daemon=True)
        self._thread.start()

    def send(self, made: MadePack) -> None:
        """Hand a pack to the channel; waits while both buffers are in use. Drops it if the run has ended.

        Raises:
            ChannelError: an earlier pack could not be sent in time.
        """
        pack, context_SE = made.pack, made.context_SE
        buffer = self._take_free(pack.item)
        if buffer is None:
            return
        copied = None
        views, stats = self._layout.views(buffer), made.stats
        if self._stream is None:
            self._layout.fill(views, pack, context_SE, stats)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._layout.fill(views, pack, context_SE, stats)
            context_SE.record_stream(self._stream)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        self._outgoing.put(_Outgoing(pack.item, buffer, copied, made.device_span))

    def close(self) -> None:
        """Wait until everything is taken, or the run has ended and nothing more will be.

        Raises:
            ChannelError: it was not, in time.
        """
        self._outgoing.put(None)
        while self._thread.is_alive() and not self._stop.has_ended():
            self._thread.join(POLL_SECONDS)
        if self._error is not None:
            raise self._error

    def _take_free(self, item: WorkItem) -> Tensor | None:
        limit = self._timeouts.of(item)
        deadline = time.monotonic() + limit + 5  # the thread reports the same wait more precisely
        while True:
            if self._error is not None:
                raise self._error
            try:
                return self._free.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._stop.has_ended():
                    return None
                if time.monotonic() > deadline:
                    raise ChannelError(
                        f"target rank {dist.get_rank()} waited {limit:.0f} s to hand over item {item.index}"
                    ) from None

    def _run(self) -> None:
        try:
            while (out := self._outgoing.get()) is not None:
                self._deliver(out)
                self._free.put(out.buffer)
        except Exception as error:  # carried over to the main thread, which raises it
            self._error = error

    def _deliver(self, out: _Outgoing) -> None:
        """Send one pack and wait until its drafter rank has taken it."""
        if out.copied is not None:
            out.copied.synchronize()
        if out.device_span is not None:  # the launch time that the main thread wrote says little
            begun, ended = out.device_span
            self._layout.views(out.buffer)["stats"][STATS.index("device_s")] = begun.elapsed_time(ended) / 1e3
        drafter = self._split.drafter_global(out.item.number % self._split.num_drafters)
        limit = self._timeouts.of(out.item)
        try:
            work = dist.isend(out.buffer, drafter, group=self._group, tag=out.item.index)
            assert work is not None
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            raise ChannelError(
                f"drafter rank {drafter} did not take {out.item.stream.name.lower()} pack {out.item.number} from"
                f" target rank {dist.get_rank()} (limit {limit:.0f} s): {first_line(error)}"
            ) from error


@dataclass
class _Arrived:
    item: WorkItem
    buffer: Tensor


class ReceivingChannel:
    """The drafter rank's end: a ring of posted receives, and the copy to the device."""

    def __init__(
        self,
        layout: PackLayout,
        schedule: Schedule,
        split: Split,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        depth: int,
        timeouts: Timeouts,
    ) -> None:
        rank = split.drafter_rank(dist.get_rank())
        assert rank is not None
        self._layout, self._split, self._group, self._device, self._timeouts = layout, split, group, device, timeouts
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._expected = schedule.for_drafter(rank, split.num_drafters)
        self._arrived: queue.Queue[_Arrived | Exception] = queue.Queue()
        self._returned: queue.Queue[tuple[Tensor, torch.cuda.Event | None]] = queue.Queue()
        for _ in range(depth):
            self._returned.put((_host_buffer(layout, device), None))
        self._staged: HiddenPack | None = None
        self.waiting = WaitClock(device)
        self._thread = threading.Thread(target=self._run, name="channel-receive", daemon=True)
        self._thread.start()

    def receive(self) -> HiddenPack:
        """The next pack on the device, and the copy of the one after it under way.

        Raises:
            ChannelError: it did not arrive in time, or another one came.
        """
        with self.waiting.measure():
            pack = self._staged if self._staged is not None else self._stage(self._arrived.get())
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._staged = None
        if self._stream is not None and not self._arrived.empty():
            self._staged = self._stage(self._arrived.get_nowait())
        return pack

    def depth(self) -> int:
        """Packs that have arrived and wait."""
        return self._arrived.qsize() + (self._staged is not None)

    def close(self) -> None:
        """Join the thread; every expected pack must have been received."""
        self._thread.join()

    def _stage(self, arrived: _Arrived | Exception) -> HiddenPack:
        if isinstance(arrived, Exception):
            raise arrived
        host = self._layout.views(arrived.buffer)
        if self._stream is None:
            device_buffer, event = arrived.buffer.clone(), None
        else:
            device_buffer = torch.empty(arrived.buffer.shape, dtype=torch.uint8, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                device_buffer.copy_(arrived.buffer, non_blocking=True)
            device_buffer.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        pack = HiddenPack.from_views(host, self._layout.views(device_buffer))
        if pack.item != arrived.item:
            raise ChannelError(f"drafter rank {dist.get_rank()} expected {arrived.item} and received {pack.item}")
        self._returned.put((arrived.buffer, event))
        return pack

    def _run(self) -> None:
        posted: deque[tuple[_Arrived, dist.Work]] = deque()
        try:
            while True:
                while (next_post := self._post(block=not posted)) is not None:
                    posted.append(next_post)
                if not posted:
                    return
                arrived, work = posted.popleft()
                self._wait(arrived.item, work)
                self._arrived.put(arrived)
        except Exception as error:  # carried over to the main thread, which raises it
            self._arrived.put(error)

    def _post(self, *, block: bool) -> tuple[_Arrived, dist.Work] | None:
        """Post the next receive if a buffer is free; None if not, or after the last item."""
        try:
            buffer, copied = self._returned.get(block=block)
        except queue.Empty:
            return None
        item = next(self._expected, None)
        if item is None:
            return None
        if copied is not None:
            copied.synchronize()
        source = item.index % self._split.num_targets
        work = dist.irecv(buffer, source, group=self._group, tag=item.index)
        assert work is not None
        return _Arrived(item, buffer), work

    def _wait(self, item: WorkItem, work: dist.Work) -> None:
        limit = self._timeouts.of(item)
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            source = item.index % self._split.num_targets
            raise ChannelError(
                f"target rank {source} did not send {item.stream.name.lower()} pack {item.number} to drafter rank"
                f" {dist.get_rank()} (limit {limit:.0f} s): {first_line(error)}"
            ) from error


class LocalChannel:
    """Colocated: the rank's own target makes the next pack when it is asked for."""

    def __init__(self, packs: Iterator[MadePack], device: torch.device) -> None:
        self._packs = packs
        self.waiting = WaitClock(device)

    def receive(self) -> HiddenPack:
        """Run the target on this rank's next pack."""
        with self.waiting.measure():
            made = next(self._packs)
        assert made.pack.item.stream is not Stream.PADDING, "colocated ranks have no padding rounds"
        host = {name: getattr(made.pack, name) for name in TOKEN_FIELDS}
        tensors = {name: staged(tensor, made.context_SE.device) for name, tensor in host.items()}
        return HiddenPack(made.pack.item, {**tensors, "context_SE": made.context_SE}, host, made.stats)

    def depth(self) -> int:
        """Nothing waits: packs are made on demand."""
        return 0

    def close(self) -> None:
        """Nothing to release."""


def first_line(error: BaseException) -> str:
    """The first line of an error's words, shortened; its type if it has none.

    torchdata wraps what a data thread raises; there the last line has its own words.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if lines[0].startswith("Caught ") else 0].strip()[:160]
