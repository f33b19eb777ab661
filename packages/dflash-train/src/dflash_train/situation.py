"""What a rank is doing, and who else is there: what its last words say when something goes wrong."""

import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from dflash_data.schedule import Stream, WorkItem
from dflash_train.mesh import Split

SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Peer:
    """A rank of the job as a process."""

    rank: int
    role: str
    host: str
    pid: int

    def condition(self) -> str | None:
        """``gone`` or ``stopped`` if it is on this host and not alive; None if it is well, or cannot be seen."""
        if self.host != socket.gethostname() or self.pid == os.getpid():
            return None
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone" if not _alive(self.pid) else None
        return {"Z": "gone", "X": "gone", "T": "stopped"}.get(state)


@dataclass
class Situation:
    """One rank's own account.

    Attributes:
        rank: in the job.
        role: ``target``, ``drafter`` or, colocated, ``rank``.
        log: the run's log file, once there is one; last words go there too.
        doing: what the main thread is at.
        since: when it began that, by the monotonic clock.
        item: the last pack it had in hand.
        peers: all ranks.
    """

    rank: int
    role: str
    log: Path | None = None
    doing: str = "starting"
    since: float = field(default_factory=time.monotonic)
    item: WorkItem | None = None
    peers: list[Peer] = field(default_factory=list)

    @classmethod
    def of(cls, split: Split, rank: int) -> "Situation":
        """At the start."""
        role = "rank" if split.colocated else "target rank" if split.target_rank(rank) is not None else "drafter rank"
        return cls(rank, role)

    def meet(self) -> None:
        """Learn of all ranks; every rank calls it."""
        own = Peer(self.rank, self.role, socket.gethostname(), os.getpid())
        everyone: list[Peer] = [own] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        self.peers = everyone

    def at(self, doing: str, item: WorkItem | None = None) -> None:
        """Note what comes now."""
        self.doing, self.since = doing, time.monotonic()
        if item is not None and item.stream is not Stream.PADDING:
            self.item = item

    def missing(self) -> list[str]:
        """The ranks on this host that are gone or stopped, as sentences' ends: ``target rank 2 (pid 71) is gone``."""
        conditions = [(peer, peer.condition()) for peer in self.peers]
        return [f"{peer.role} {peer.rank} (pid {peer.pid}) is {state}" for peer, state in conditions if state]

    def last_words(self, problem: str, *, settle_seconds: float = SETTLE_SECONDS) -> None:
        """Print one line to stderr and to the run's log: who is missing, who says so, doing what, the last pack.

        A killed process closes its connections before it is seen to be gone, so where all are there it looks again, for
        so many seconds.
        """
        deadline = time.monotonic() + settle_seconds
        while not (missing := self.missing()) and time.monotonic() < deadline:
            time.sleep(0.02)
        last = f" (last {self.item.stream.name.lower()} pack {self.item.number})" if self.item else ""
        self.say("error: " + "; ".join([*missing, f"{self.role} {self.rank}, {self.doing}{last}: {problem}"]))

    def say(self, line: str) -> None:
        """Print a line to stderr and to the run's log, on any rank."""
        _say(line)
        if self.log is not None:
            try:
                with self.log.open("a") as file:
                    file.write(line + "\n")
            except OSError as error:
                _say(f"{self.log} cannot be written: {error}")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
