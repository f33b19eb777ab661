"""Time the channel by itself: torchrun --nproc-per-node N tools/bench.py channel mesh.target=T mesh.drafter=D

Every target rank hands over one ready pack again and again, every drafter rank drops what comes. Nothing is computed,
so this is what the channel can do; what a job asks of it is packs times their bytes.
"""

import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dflash_data.packs import STATS, PackLayout, TokenPack
from dflash_data.pipeline import MadePack
from dflash_data.schedule import Schedule, WorkItem
from dflash_model import UserError
from dflash_train.channel import ReceivingChannel, SendingChannel, Timeouts
from dflash_train.cli import parse
from dflash_train.config import MeshSection, key
from dflash_train.mesh import Split, make_split
from dflash_train.stop import Stop

TIMEOUTS = Timeouts(first=120, later=60, settled=1)


@dataclass
class ChannelBench:
    """Packs of a size, from T ranks to D."""

    config: str = key("", "YAML file that the other keys override")
    mesh: MeshSection = field(default_factory=MeshSection)
    seq_len: int = key(4096, "S")
    context_size: int = key(25600, "E, taps times target width; those of Qwen3.6-27B with five taps")
    anchors: int = key(512, "A")
    block_size: int = key(16, "K")
    depth: int = key(4, "as channel.depth")
    warmup: int = key(5, "packs to each drafter rank that are not counted")
    packs: int = key(40, "packs to each drafter rank that are")


def bench_channel(argv: list[str]) -> dict[str, Any] | None:
    """Send, receive, measure; None on all ranks but the first."""
    bench, world = parse(ChannelBench, argv, __doc__ or ""), int(os.environ.get("WORLD_SIZE", "1"))
    split = make_split(bench.mesh, world)
    if split.colocated:
        raise UserError(f"every rank of {world} holds both roles; a channel takes torchrun with two ranks or more")
    for name in ("seq_len", "context_size", "anchors", "depth", "warmup", "packs"):
        if getattr(bench, name) < 1:
            raise UserError(f"{name} is {getattr(bench, name)}; it must be at least 1")
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if torch.cuda.is_available() and bench.mesh.device != "cpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    layout = PackLayout(bench.seq_len, bench.anchors, bench.block_size, bench.context_size, torch.bfloat16)
    seconds = [0.0] * world
    dist.all_gather_object(seconds, _one_rank(bench, split, layout, rank, device))
    dist.destroy_process_group()
    if rank:
        return None
    moved, slowest = bench.packs * layout.num_bytes * split.num_drafters, max(seconds)
    return {
        "bench": "channel", "split": split.describe(), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "pack_mib": layout.num_bytes / 2**20, "packs": bench.packs * split.num_drafters, "seconds": slowest,
        "gb_s": moved / slowest / 1e9,
        "gb_s_of_each_drafter": [
            round(bench.packs * layout.num_bytes / part / 1e9, 2) for part in seconds[split.num_targets :]
        ],
        "ktok_s": bench.packs * split.num_drafters * bench.seq_len / slowest / 1e3,
    }  # fmt: skip


def _one_rank(bench: ChannelBench, split: Split, layout: PackLayout, rank: int, device: torch.device) -> float:
    """Seconds in which a drafter rank took the counted packs; 0 of a target rank."""
    plan = Schedule(
        start_step=0, start_pack=0, evaluated=True, num_steps=bench.warmup + bench.packs,
        packs_per_step=split.num_drafters, heldout_packs=0, evaluate_interval=1,
    )  # fmt: skip
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    drafter_rank = split.drafter_rank(rank)
    if drafter_rank is None:
        sender = SendingChannel(layout, split, group, device=device, timeouts=TIMEOUTS, stop=Stop())
        context_SE = torch.randn(bench.seq_len, bench.context_size, device=device).bfloat16()
        for item in plan.for_target(rank, split.num_targets):
            if item.index < plan.length:
                sender.send(MadePack(_zeros(item, bench), context_SE, dict.fromkeys(STATS, 0.0), None))
        sender.close()
        return 0.0
    receiver = ReceivingChannel(layout, plan, split, group=group, device=device, depth=bench.depth, timeouts=TIMEOUTS)
    began = 0.0
    for number, _ in enumerate(plan.for_drafter(drafter_rank, split.num_drafters), start=1):
        receiver.receive()
        if number == bench.warmup:
            began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    receiver.close()
    return took


def _zeros(item: WorkItem, bench: ChannelBench) -> TokenPack:
    row, anchors = torch.zeros(bench.seq_len, dtype=torch.int32), torch.zeros(bench.anchors, dtype=torch.int32)
    blocks = torch.zeros(bench.anchors, bench.block_size, dtype=torch.int32)
    return TokenPack(item, row, row, row, row.to(torch.uint8), anchors, anchors, blocks, blocks.float())
