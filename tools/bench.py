"""Time a part: python tools/bench.py MODE key=value…

step        a training step of the drafter            target      the target's forward up to its last tap
loss        its head and loss                         pipeline    a whole job, on as many ranks as torchrun starts
mask        its block-sparse mask                     channel     packs from target ranks to drafter ranks
peer        SpecForge's own step on the same sizes    decode      drafted decoding against plain
checkpoint  what saving costs a step                  data        preparing conversations
watch       what timing and logging cost a step       costs       the step, one setting changed at a time

"tools/bench.py MODE --help" lists the keys of a mode. The last line is one JSON object: medians and spread.
"""

import json

from bench_channel import bench_channel
from bench_checkpoint import bench_checkpoint
from bench_costs import bench_costs
from bench_data import bench_data
from bench_decode import bench_decode
from bench_loss import bench_loss
from bench_mask import bench_mask
from bench_peer import bench_peer
from bench_pipeline import bench_pipeline
from bench_step import bench_step
from bench_target import bench_target
from bench_watch import bench_watch
from dflash_model import UserError
from dflash_train.cli import run_tool

BENCHES = {
    "step": bench_step, "costs": bench_costs, "loss": bench_loss, "mask": bench_mask, "peer": bench_peer,
    "target": bench_target, "pipeline": bench_pipeline, "channel": bench_channel, "decode": bench_decode,
    "checkpoint": bench_checkpoint, "data": bench_data, "watch": bench_watch,
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Dispatch on the first word."""
    if argv[:1] in (["--help"], ["-h"], ["help"]):
        print(__doc__)
        return 0
    if not argv or argv[0] not in BENCHES:
        raise UserError(f"the first word is {argv[0] if argv else 'missing'}; it takes {', '.join(BENCHES)}")
    result = BENCHES[argv[0]](argv[1:])
    if result is None:  # another rank tells
        return 0
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    run_tool(main)
