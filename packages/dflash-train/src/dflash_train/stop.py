"""Ending a run early, by agreement: all ranks leave behind the same step, and the drafter ranks save it.

A signal reaches a thread through a pipe that Python's C-level handler writes: the main thread may be inside a
collective for as long as it likes. The thread only notes the wish. The main threads agree: whoever was asked says
so in the job's store; behind each step the drafter ranks look there and settle it with one small all-reduce; the target
ranks learn of it in the store and leave in the same round, also by one all-reduce.

torchrun sends SIGTERM for two reasons: somebody stops it, or a rank has died. In the second case no agreement can be
had, so a rank looks whether its neighbours are alive first.
"""

import os
import shlex
import signal
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dflash_train.situation import Situation

GRACE_SECONDS = 25.0  # torchrun kills 30 s after the signal
ECHO_SECONDS = 2.0  # on Ctrl-C the terminal signals every process, and torchrun passes its own on
ASKED, ENDED, REFUSED = "dflash-stop-asked", "dflash-stop-ended", "dflash-refused"


class Stop:
    """One rank's part in the agreement. Without ``listen`` it only reacts to ``ask``.

    Attributes:
        saves: whether what is stopped is saved; a bench's drafter has learnt nothing.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self.saves = saves
        self._asked = threading.Event()
        self._told = False
        self.reason = "stop asked for"
        self.agreed_step: int | None = None
        self.over = False

    def ask(self, reason: str) -> None:
        """Wish the run to end behind the step under way; from any thread."""
        if not self._asked.is_set():
            self.reason = reason
            self._asked.set()

    def refuse(self) -> None:
        """Let ranks that have not met a wrong setting yet leave without a word: the one that has tells."""
        if dist.is_initialized():
            _get_default_store().set(REFUSED, "1")

    # Called by the main thread -------------------------------------------------------------------------------------

    def drafters_agree(self, group: dist.ProcessGroup, step: int) -> bool:
        """Whether the drafter ranks end behind ``step``; all of them call it, behind every step."""
        self._tell()
        first = dist.get_rank(group) == 0
        asked = torch.tensor(int(self._asked.is_set() or (first and _get_default_store().check([ASKED]))))
        if dist.get_world_size(group) > 1:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
        if not asked:
            return False
        self.end(step, first=first)
        return True

    def end(self, step: int, *, first: bool) -> None:
        """Tell the target ranks that nothing is consumed behind ``step``."""
        self.agreed_step, store = step, _get_default_store()
        if first:
            store.set(ENDED, str(step))
            if store.check([ASKED]):
                self.reason = store.get(ASKED).decode()

    def targets_agree(self, group: dist.ProcessGroup) -> bool:
        """Whether the target ranks leave in this round; all of them call it, in every round."""
        ended = torch.tensor(int(self.has_ended()))
        if dist.get_world_size(group) > 1:
            dist.all_reduce(ended, op=dist.ReduceOp.MAX, group=group)
        return bool(ended)

    def has_ended(self) -> bool:
        """Whether the drafter ranks take no more packs; looks into the store."""
        self._tell()
        store = _get_default_store()
        if self.agreed_step is None and store.check([ENDED]):
            self.agreed_step = int(store.get(ENDED))
        return self.agreed_step is not None

    def _tell(self) -> None:
        if self._asked.is_set() and not self._told:
            _get_default_store().set(ASKED, self.reason)
            self._told = True

    # Signals ---------------------------------------------------------------------------------------------------------

    def listen(self, situation: Situation) -> None:
        """Take SIGTERM and SIGINT as wishes from now on; call it on the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._sockets = (reader, writer)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the thread acts
        threading.Thread(target=self._watch, args=(reader, situation), name="signals", daemon=True).start()

    @staticmethod
    def _refused() -> bool:
        """Whether a rank has met a wrong setting and tells of it."""
        try:
            return dist.is_initialized() and _get_default_store().check([REFUSED])
        except RuntimeError:  # the store is gone with its host
            return False

    def _watch(self, reader: socket.socket, situation: Situation) -> None:
        name = signal.Signals(reader.recv(1)[0]).name
        began = time.monotonic()
        if self.over:
            return
        if self.agreed_step is None and situation.missing():
            if not self._refused():
                situation.last_words(f"{name}, and the job is not complete any more")
            os._exit(1)
        self.ask(f"{name} on {situation.role} {situation.rank}")
        reader.settimeout(0.2)
        warned = False
        while not self.over:
            passed = time.monotonic() - began
            if passed > GRACE_SECONDS and self.agreed_step is None:
                situation.last_words(f"{name}: no agreement within {GRACE_SECONDS:.0f} s; what was saved before stays")
                os._exit(1)
            if passed > GRACE_SECONDS and not warned:
                warned = True
                situation.last_words(
                    f"{name}: still at it; if torchrun ends the job before, what was saved earlier stays"
                )
            if self.agreed_step is None and situation.missing():
                situation.last_words(f"{name}, and no agreement is possible")
                os._exit(1)
            try:
                again = reader.recv(1)[0]
            except TimeoutError:
                continue
            if passed > ECHO_SECONDS:
                situation.last_words(
                    f"{signal.Signals(again).name} again: leaving at once, nothing more is saved", settle_seconds=0.0
                )
                os._exit(128 + again)


def same_command() -> str:
    """The command line that continues this run."""
    ranks, nodes = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("GROUP_WORLD_SIZE", "1")
    restarts, run_id = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    options = f"--nnodes {nodes} " if nodes != "1" else "--standalone " if run_id != "none" else ""
    options += f"--max-restarts {restarts} " if restarts != "0" else ""
    start = f"torchrun {options}--nproc-per-node {ranks}" if ranks else "python"
    return f"{start} {shlex.join(sys.argv)}"
