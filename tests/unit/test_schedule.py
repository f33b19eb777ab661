"""The job's sequence against one written out by hand, and its division among ranks."""

import pytest

from dflash_data.schedule import Schedule, Stream, WorkItem

SPLITS = [(1, 1), (2, 1), (1, 2), (3, 2), (5, 3), (4, 6)]


def make(start_step: int = 0, num_steps: int = 5, packs: int = 6, heldout: int = 6, interval: int = 2) -> Schedule:
    return Schedule(
        start_step=start_step,
        start_pack=start_step * packs,
        evaluated=start_step > 0,
        num_steps=num_steps,
        packs_per_step=packs,
        heldout_packs=heldout,
        evaluate_interval=interval,
    )


def written(schedule: Schedule) -> str:
    """Items in order, such as ``h0 t0 t1``."""
    items = [schedule.item(index) for index in range(schedule.length)]
    assert [item.index for item in items] == list(range(schedule.length))
    return " ".join(f"{'th-'[item.stream]}{item.number}" for item in items)


def test_a_small_run_by_hand() -> None:
    """Evaluations before the first step, after every second and after the last."""
    schedule = make(num_steps=3, packs=2, heldout=1, interval=2)
    assert written(schedule) == "h0 t0 t1 t2 t3 h0 t4 t5 h0"
    assert [(segment.step, segment.stream.name) for segment in schedule.segments] == [
        (0, "HELDOUT"), (1, "TRAIN"), (2, "TRAIN"), (2, "HELDOUT"), (3, "TRAIN"), (3, "HELDOUT"),
    ]  # fmt: skip
    assert schedule.item(9) == WorkItem(9, Stream.PADDING, 0)


def test_the_last_step_is_evaluated_once() -> None:
    assert written(make(num_steps=2, packs=1, heldout=2, interval=2)) == "h0 h1 t0 t1 h0 h1"
    assert written(make(num_steps=2, packs=1, heldout=1, interval=9)) == "h0 t0 t1 h0"


def test_without_heldout_packs_there_is_only_training() -> None:
    assert written(make(num_steps=2, packs=2, heldout=0, interval=1)) == "t0 t1 t2 t3"


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_a_resumed_run_is_the_tail_of_the_straight_one(start: int) -> None:
    """A checkpoint stands after its step's evaluation, so training comes first."""
    whole, rest = make(), make(start_step=start)
    straight = [whole.item(index) for index in range(whole.length)][-rest.length :]
    resumed = [rest.item(index) for index in range(rest.length)]
    assert [(item.stream, item.number) for item in resumed] == [(item.stream, item.number) for item in straight]
    assert (resumed[0].stream, resumed[0].number) == (Stream.TRAIN, start * 6)
    tail = [(segment.step, segment.stream, segment.count) for segment in whole.segments]
    assert [(s.step, s.stream, s.count) for s in rest.segments] == tail[-len(rest.segments) :]


def test_a_finished_run_has_nothing_left() -> None:
    finished = make(start_step=5)
    assert (finished.length, finished.segments, finished.rounds(3)) == (0, [], 0)
    assert list(finished.for_target(0, 3)) == []


@pytest.mark.parametrize("targets", sorted({targets for targets, _ in SPLITS}))
@pytest.mark.parametrize("start", [0, 3])
def test_targets_make_every_pack_once_in_equal_rounds(targets: int, start: int) -> None:
    schedule = make(start_step=start)
    ranks = [list(schedule.for_target(rank, targets)) for rank in range(targets)]
    assert {len(items) for items in ranks} == {schedule.rounds(targets)}
    made = [item for items in ranks for item in items if item.stream is not Stream.PADDING]
    assert sorted(made, key=lambda item: item.index) == [schedule.item(index) for index in range(schedule.length)]
    assert sorted(item.number for item in made if item.stream is Stream.TRAIN) == list(range(start * 6, 30))
    padding = sum(item.stream is Stream.PADDING for items in ranks for item in items)
    assert padding == -schedule.length % targets
    for rank, items in enumerate(ranks):
        assert [item.index for item in items] == list(range(rank, schedule.rounds(targets) * targets, targets))


@pytest.mark.parametrize("drafters", sorted({drafters for _, drafters in SPLITS}))
def test_drafters_partition_the_items_and_take_them_in_order(drafters: int) -> None:
    schedule = make()
    ranks = [list(schedule.for_drafter(rank, drafters)) for rank in range(drafters)]
    taken = sorted((item for items in ranks for item in items), key=lambda item: item.index)
    assert taken == [schedule.item(index) for index in range(schedule.length)]
    for rank, items in enumerate(ranks):
        indices = [item.index for item in items]
        assert indices == sorted(indices)
        assert {item.number % drafters for item in items} == {rank}
        for segment in schedule.segments:
            inside = [i for i in indices if segment.first_index <= i < segment.first_index + segment.count]
            assert len(inside) == segment.count // drafters, "every rank works equally in every step and evaluation"
