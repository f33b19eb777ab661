"""The channel by itself: order, content, bounded memory, and what a lost peer looks like."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dflash_data.packs import STATS, PackLayout, TokenPack
from dflash_data.pipeline import MadePack
from dflash_data.schedule import Schedule, Stream, WorkItem
from dflash_train.channel import ChannelError, ReceivingChannel, SendingChannel, Timeouts
from dflash_train.mesh import Split
from dflash_train.stop import Stop
from support.ranks import run_ranks

LAYOUT = PackLayout(seq_len=128, num_anchors=16, block_size=8, context_size=24, context_dtype=torch.bfloat16)
CPU = torch.device("cpu")
TIMEOUTS = Timeouts(first=20, later=20, settled=0)


def made(item: WorkItem) -> MadePack:
    """A pack whose every field says which item it is."""
    row, blocks = torch.full((128,), item.index, dtype=torch.int32), torch.full((16, 8), item.index, dtype=torch.int32)
    anchors = torch.full((16,), item.number, dtype=torch.int32)
    pack = TokenPack(item, row, row, row, row.to(torch.uint8), anchors, anchors, blocks, blocks.float())
    stats = dict.fromkeys(STATS, float(item.index))
    return MadePack(pack, torch.full((128, 24), item.index, dtype=torch.bfloat16), stats, None)


def schedule(steps: int) -> Schedule:
    return Schedule(
        start_step=0, start_pack=0, evaluated=False, num_steps=steps, packs_per_step=6, heldout_packs=3,
        evaluate_interval=2,
    )  # fmt: skip


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (1, 3), (5, 3)])
def test_every_pack_arrives_in_order_whatever_the_speeds(targets: int, drafters: int, tmp_path: Path) -> None:
    split, plan = Split(targets, drafters, colocated=False), schedule(4)

    def work(rank: int) -> list[tuple[int, int, int]]:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        if rank < targets:
            sender = SendingChannel(LAYOUT, split, group, device=CPU, timeouts=TIMEOUTS, stop=Stop())
            for item in plan.for_target(rank, targets):
                if item.stream is not Stream.PADDING:
                    time.sleep(0.002 * (rank == 1))  # one slow target
                    sender.send(made(item))
            sender.close()
            return []
        receiver = ReceivingChannel(LAYOUT, plan, split, group=group, device=CPU, depth=2, timeouts=TIMEOUTS)
        seen = []
        for item in plan.for_drafter(rank - targets, drafters):
            pack = receiver.receive()
            time.sleep(0.003 * (rank == targets))  # one slow drafter
            assert pack.item == item
            for name in ("input_ids_S", "label_AK", "weight_AK", "context_SE"):
                assert (pack.tensors[name] == item.index).all(), name
            assert pack.stats["forward_s"] == item.index
            seen.append((item.index, int(item.stream), item.number))
        receiver.close()
        return seen

    results = run_ranks(work, targets + drafters, tmp_path)
    everything = sorted(entry for part in results for entry in part)
    assert [index for index, _, _ in everything] == list(range(plan.length))


def test_a_slow_drafter_holds_the_target_back(tmp_path: Path) -> None:
    """At most ``depth`` posted receives and two buffers are ever ahead of the drafter."""
    split, plan, depth = Split(1, 1, colocated=False), schedule(10), 3
    sent = multiprocessing.Value("i", 0)

    def work(rank: int) -> int:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        if rank == 0:
            sender = SendingChannel(LAYOUT, split, group, device=CPU, timeouts=TIMEOUTS, stop=Stop())
            for item in plan.for_target(0, 1):
                sender.send(made(item))
                sent.value += 1
            sender.close()
            return 0
        receiver = ReceivingChannel(LAYOUT, plan, split, group=group, device=CPU, depth=depth, timeouts=TIMEOUTS)
        ahead = 0
        for received in range(plan.length):
            time.sleep(0.02)
            ahead = max(ahead, sent.value - received)
            receiver.receive()
        receiver.close()
        return ahead

    ahead = run_ranks(work, 2, tmp_path)[1]
    assert depth < ahead <= depth + 2


def test_a_dead_drafter_is_named(tmp_path: Path) -> None:
    split, plan = Split(1, 1, colocated=False), schedule(10)
    context = multiprocessing.get_context("fork")
    message = context.SimpleQueue()

    def work(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        if rank == 1:
            ReceivingChannel(LAYOUT, plan, split, group=group, device=CPU, depth=2, timeouts=TIMEOUTS).receive()
            os._exit(9)
        sender = SendingChannel(LAYOUT, split, group, device=CPU, timeouts=TIMEOUTS, stop=Stop())
        try:
            for item in plan.for_target(0, 1):
                sender.send(made(item))
            sender.close()
        except ChannelError as error:
            message.put(str(error))

    processes = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert not any(process.is_alive() for process in processes)
    assert "drafter rank 1 did not take" in message.get()
