"""Counting the steps that were skipped because their gradients were not finite.

The optimizer skips them by a flag on the device. The flag is copied to the host beside the next step and read behind
it, so that no step waits for the device.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Flag:
    finite: Tensor
    copied: torch.cuda.Event | None
    packs: range


class FiniteWatch:
    """Skipped steps of one run; the same on all drafter ranks, as the gradient norm is.

    Args:
        limit: skipped steps in a row that are too many.
        skipped: steps skipped before.
        in_a_row: of these, the last ones without another between; as many as the limit have stopped the run already.
    """

    def __init__(self, limit: int, skipped: int = 0, in_a_row: int = 0) -> None:
        self.limit, self.skipped, self.in_a_row = limit, skipped, in_a_row if in_a_row < limit else 0
        self._pending: deque[_Flag] = deque()
        self._last: deque[range] = deque(maxlen=limit)

    @property
    def too_many(self) -> bool:
        """Whether the run must stop."""
        return self.in_a_row >= self.limit

    def add(self, finite: Tensor, packs: range) -> Iterator[range]:
        """Note a step's flag, and yield the packs of the step before if that was skipped."""
        copied = None
        if finite.device.type == "cuda":
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(finite, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        else:
            host = finite.clone()
        self._pending.append(_Flag(host, copied, packs))
        if len(self._pending) > 1:
            yield from self._read()

    def settle(self) -> Iterator[range]:
        """Read the flag of the step under way too: before a checkpoint, which must know its count."""
        while self._pending:
            yield from self._read()

    def _read(self) -> Iterator[range]:
        flag = self._pending.popleft()
        if flag.copied is not None:
            flag.copied.synchronize()
        if bool(flag.finite):
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        self._last.append(flag.packs)
        yield flag.packs

    def sentence(self) -> str:
        """Why the run stopped."""
        first, last = (self._last[0].start, self._last[-1].stop - 1) if self._last else (0, 0)
        return (
            f"trainer.max_skipped_steps is {self.limit}, and as many steps in a row had gradients that are not finite"
            f" (the last on packs {first} to {last}); a checkpoint was saved. A lower optimizer.lr or"
            " optimizer.max_grad_norm, or a look at these packs' documents, may help"
        )
