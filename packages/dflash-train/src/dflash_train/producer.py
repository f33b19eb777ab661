"""The loop of a target rank: it makes packs and hands them over."""

from collections.abc import Iterable

from dflash_data.clock import OTHER, StageClock
from dflash_data.pipeline import MadePack
from dflash_data.schedule import Stream
from dflash_train.channel import SendingChannel, Timeouts
from dflash_train.mesh import Meshes
from dflash_train.situation import Situation
from dflash_train.stop import Stop
from dflash_train.watch import DeviceWatch, StallWatch


def make_packs(
    packs: Iterable[MadePack], channel: SendingChannel, meshes: Meshes, timeouts: Timeouts, stop: Stop,
    situation: Situation, clock: StageClock,
) -> None:  # fmt: skip
    """Run the target, hand the result over, keep in step with the other target ranks."""
    settled, devices = False, DeviceWatch(meshes.device)
    stalls: StallWatch | None = None
    situation.at("making the first pack")
    clock.take()  # what came before is the start
    for made in packs:
        situation.at("handing a pack over", made.pack.item)
        with clock.stage("agree"):
            ended = stop.targets_agree(meshes.control)
        if ended:
            break
        spent = clock.take()
        made.stats |= {f"{stage}_s": float(spent[stage]) for stage in ("agree", "send", OTHER)}
        made.stats["busy"] = devices.latest
        if not settled and made.pack.item.index >= timeouts.settled:
            meshes.settle(timeouts.later)
            settled = True
            if meshes.rank == 0:  # the first drafter rank tells of everybody but itself
                stalls = StallWatch(
                    situation, timeouts.later, lambda alarm: situation.say(f"ALARM: {alarm}"),
                    only_if=next(peer.rank for peer in situation.peers if peer.role == "drafter rank"),
                )  # fmt: skip
        if made.pack.item.stream is not Stream.PADDING:
            with clock.stage("send"):
                channel.send(made)
        situation.at("making the next pack")
    situation.at("waiting for the drafter ranks")
    if stalls is not None:
        stalls.close()
    channel.close()
