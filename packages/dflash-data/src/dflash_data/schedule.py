"""What the whole job works through, as one numbered sequence that every rank knows.

The sequence interleaves the training packs of each step with the held-out packs of each evaluation. Item i is made by
target rank ``i mod T``; training pack k and held-out pack k go to drafter rank ``k mod D``. There is nothing to
negotiate: source, destination and order of every item are functions of its index.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class Stream(IntEnum):
    """Which numbered stream a pack belongs to."""

    TRAIN = 0
    HELDOUT = 1
    PADDING = 2  # no pack: keeps the rounds of all ranks equal


@dataclass(frozen=True)
class WorkItem:
    """One pack to make: its place in the job's sequence, its stream and its number in that stream."""

    index: int
    stream: Stream
    number: int


@dataclass(frozen=True)
class Segment:
    """A run of items of one stream.

    ``step`` counts finished optimizer steps once the segment is done: the packs that lead to it, or its evaluation.
    """

    step: int
    stream: Stream
    first_index: int
    first_number: int
    count: int


class Schedule:
    """The sequence from ``start_step`` to the end of the run.

    An evaluation follows every step that ``evaluate_interval`` divides, and the last one; a fresh run begins with one.
    It precedes the checkpoint of its step, so a resumed run begins with training, unless the checkpoint was made
    because the run was stopped before it.

    Args:
        start_step: finished steps; a resumed run starts where its checkpoint stands.
        start_pack: number of the first training pack.
        evaluated: whether the evaluation behind ``start_step``, if one is due, has been done.
        num_steps: steps of the whole run.
        packs_per_step: G.
        heldout_packs: packs of one evaluation, a multiple of the number of drafter ranks; 0 for no evaluation.
        evaluate_interval: steps between evaluations.
    """

    def __init__(
        self, *, start_step: int, start_pack: int, evaluated: bool, num_steps: int, packs_per_step: int,
        heldout_packs: int, evaluate_interval: int,
    ) -> None:  # fmt: skip
        self.segments: list[Segment] = []
        index = 0
        for step in range(start_step, num_steps + 1):
            if step > start_step:
                number = start_pack + (step - start_step - 1) * packs_per_step
                self.segments.append(Segment(step, Stream.TRAIN, index, number, packs_per_step))
                index += packs_per_step
            due = step % evaluate_interval == 0 or step == num_steps
            if heldout_packs and due and (step > start_step or not evaluated):
                self.segments.append(Segment(step, Stream.HELDOUT, index, 0, heldout_packs))
                index += heldout_packs
        self.length = index
        self._firsts = [segment.first_index for segment in self.segments]

    def item(self, index: int) -> WorkItem:
        """The item at ``index``; past the end, padding."""
        if index >= self.length:
            return WorkItem(index, Stream.PADDING, 0)
        segment = self.segments[bisect_right(self._firsts, index) - 1]
        return WorkItem(index, segment.stream, segment.first_number + index - segment.first_index)

    @property
    def first_step_end(self) -> int:
        """Index after the packs of the first step."""
        ends = (s.first_index + s.count for s in self.segments if s.stream is Stream.TRAIN)
        return next(ends, self.length)

    def rounds(self, num_targets: int) -> int:
        """Rounds every target rank runs, the last one filled up with padding."""
        return -(-self.length // num_targets)

    def for_target(self, rank: int, num_targets: int) -> Iterator[WorkItem]:
        """The items of one target rank, padding included."""
        return (self.target_item(round_, rank, num_targets) for round_ in range(self.rounds(num_targets)))

    def target_item(self, round_: int, rank: int, num_targets: int) -> WorkItem:
        """What a target rank makes in a round."""
        return self.item(round_ * num_targets + rank)

    def for_drafter(self, rank: int, num_drafters: int) -> Iterator[WorkItem]:
        """The items of one drafter rank, in the order in which it consumes them."""
        for segment in self.segments:
            for offset in range(segment.count):
                if (segment.first_number + offset) % num_drafters == rank:
                    yield WorkItem(segment.first_index + offset, segment.stream, segment.first_number + offset)
