"""Whether every pack leaves the channel as it went in: torchrun … tests/gpu/multi/digests.py T D DEVICE

T target ranks send packs of random content, D drafter ranks take them; the first of either dawdles, so that both a slow
writer and a slow reader are met. Both ends hash what they hold, and the hashes must be the same for every pack.
"""

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_data.packs import STATS, TOKEN_FIELDS, PackLayout, TokenPack
from dflash_data.pipeline import MadePack
from dflash_data.schedule import Schedule, WorkItem
from dflash_train.channel import ReceivingChannel, SendingChannel, Timeouts
from dflash_train.mesh import Split
from dflash_train.stop import Stop

PACKS, HELDOUT = 24, 5
LAYOUT = PackLayout(seq_len=1024, num_anchors=64, block_size=16, context_size=2560, context_dtype=torch.bfloat16)
TIMEOUTS = Timeouts(first=60, later=30, settled=1)


def random_pack(item: WorkItem, device: torch.device) -> MadePack:
    """Content that only this item has; its context is computed on the device right before it is handed over."""
    generator = torch.Generator().manual_seed(item.index)
    row, anchors, blocks = (
        torch.randint(0, 1 << 30, shape, generator=generator, dtype=torch.int32) for shape in ((1024,), (64,), (64, 16))
    )
    pack = TokenPack(item, row, row + 1, row + 2, row.to(torch.uint8), anchors, anchors + 1, blocks, blocks.float())
    noise = torch.randn(1024, 2560, generator=generator).to(device)
    return MadePack(
        pack, (noise @ torch.full((2560, 2560), 0.02, device=device)).bfloat16(), dict.fromkeys(STATS, 0.0), None
    )


def digest(tensors: dict[str, Tensor]) -> str:
    """Of the bytes of all fields."""
    known = hashlib.sha256()
    for name in (*TOKEN_FIELDS, "context_SE"):
        known.update(tensors[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return known.hexdigest()


def main(targets: int, drafters: int, kind: str) -> int:
    """Send, take, compare."""
    split, rank = Split(targets, drafters, colocated=False), int(os.environ["RANK"])
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    plan = Schedule(
        start_step=0, start_pack=0, evaluated=False, num_steps=PACKS, packs_per_step=drafters,
        heldout_packs=HELDOUT * drafters, evaluate_interval=8,
    )  # fmt: skip
    mine: dict[int, str] = {}
    if rank < targets:
        sender = SendingChannel(LAYOUT, split, group, device=device, timeouts=TIMEOUTS, stop=Stop())
        for item in plan.for_target(rank, targets):
            if item.index < plan.length:
                made = random_pack(item, device)
                fields = {name: getattr(made.pack, name) for name in TOKEN_FIELDS} | {"context_SE": made.context_SE}
                mine[item.index] = digest(fields)
                sender.send(made)
                time.sleep(0.05 * (rank == 0 and item.index < plan.length // 2))
        sender.close()
    else:
        receiver = ReceivingChannel(LAYOUT, plan, split, group=group, device=device, depth=4, timeouts=TIMEOUTS)
        for item in plan.for_drafter(rank - targets, drafters):
            pack = receiver.receive()
            assert pack.item == item, (pack.item, item)
            mine[item.index] = digest(pack.tensors)
            time.sleep(0.05 * (rank == targets and item.index >= plan.length // 2))
        receiver.close()
    both: list[dict[int, str]] = [{}] * (targets + drafters)
    dist.all_gather_object(both, mine)
    dist.destroy_process_group()
    sent, taken = (
        {index: found for part in parts for index, found in part.items()} for parts in (both[:targets], both[targets:])
    )
    assert len(set(sent.values())) == plan.length
    assert sent == taken, [index for index in sent if sent[index] != taken.get(index)]
    if rank == 0:
        sys.stdout.write(f"digests of {plan.length} packs are equal on both ends\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
