"""Which part of the job holds the others up, by rule from measured times, and what would help.

An empty queue of hidden states beside idle drafter ranks means that they are starved: the target side, its host thread,
its data or the channel is slow, never the drafters. So the first question is whether the drafter ranks wait, and only
then what the target ranks do meanwhile.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_data.packs import STATS
from dflash_train.mesh import Split

Values = NDArray[np.float64]
DRAFTER = (
    "receive", "compute", "device", "agree", "save", "log", "evaluate", "other", "compile", "wait", "packs", "q_hs",
    "busy", "tokens",
)  # fmt: skip
STAGES = DRAFTER[:8]  # exclusive: they add up to wall time
WAITS, LARGE, SKEW = 0.1, 0.25, 0.2  # shares of time: drafters wait, a stage is a burden, ranks differ
LAUNCHES = 0.05  # less of its time than this waits a host for its GPU: the GPU waits for it
IDLE_GPU, BUSY_GPU = 0.1, 0.9  # shares of time with a kernel running: starved; not held up by its host
WORTH = 1.1  # gain for which another split is proposed


@dataclass(frozen=True)
class Accounts:
    """One interval of the whole job.

    Attributes:
        split: who does what.
        packs_per_step: what another number of drafter ranks must divide.
        targets: ``[T, 1 + len(STATS)]``: packs, and sums of what target ranks wrote beside each.
        drafters: ``[D, len(DRAFTER)]``: seconds by stage on the host thread; ``compile`` is part of ``compute``;
            ``wait`` the time without a pack (on a GPU the device's own); ``busy`` the share of time its GPU ran a
            kernel (-1 if unknown); ``tokens`` the document tokens since the log line before, in other processes too.
        on_gpu: whether the stages are times to launch work.
    """

    split: Split
    packs_per_step: int
    targets: Values
    drafters: Values
    on_gpu: bool = False

    def target(self, name: str) -> Values:
        """Mean of a statistic per pack, of each target rank that made one."""
        active = self.targets[:, 0] > 0
        column = self.targets[active, 1 + STATS.index(name)]
        return column / self.targets[active, 0]

    def drafter(self, name: str) -> Values:
        """One column of the drafter ranks."""
        return self.drafters[:, DRAFTER.index(name)]

    @property
    def wall_s(self) -> float:
        """Length of the interval."""
        return max(float(np.sum([self.drafter(name) for name in STAGES], axis=0).mean()), 1e-9)

    @property
    def train_s(self) -> float:
        """The part of it that is training: not evaluating, saving or writing the log."""
        away = sum(self.drafter(name) for name in ("evaluate", "save", "log"))
        return max(self.wall_s - float(np.mean(away)), 1e-9)

    @property
    def wait_share(self) -> float:
        """How much of training the drafter ranks are without a pack."""
        return min(float(self.drafter("wait").mean()) / self.train_s, 1.0)

    @property
    def packs_s(self) -> float:
        """Packs per second through the whole job."""
        return float(self.drafter("packs").sum()) / self.train_s

    @property
    def tokens_per_pack(self) -> float:
        """Document tokens in a pack."""
        packs = max(float(self.targets[:, 0].sum()), 1.0)
        return float(self.targets[:, 1 + STATS.index("document_tokens")].sum()) / packs

    @property
    def tokens_s(self) -> float:
        """Document tokens per second through the whole job."""
        return self.packs_s * self.tokens_per_pack

    @property
    def target_packs_s(self) -> float:
        """What all target ranks could make if nobody held them up."""
        if not self.targets[:, 0].any():
            return 0.0
        if self.split.colocated:  # the rank's own target is what it waits for
            return float(self.drafter("packs").sum()) / max(float(self.drafter("wait").mean()), 1e-9)
        busy = np.maximum(self.target("device_s"), self.target("forward_s")) + self.target("data_s")
        return self.split.num_targets / max(float((busy + self.target("other_s")).mean()), 1e-9)

    @property
    def drafter_packs_s(self) -> float:
        """What all drafter ranks could train on if packs were always there."""
        return float(self.drafter("packs").sum()) / max(self.train_s * (1 - self.wait_share), 1e-9)

    def rates(self) -> dict[str, float]:
        """What is logged: packs and tokens per second of the job, and what each side could do alone."""
        tokens = self.tokens_per_pack
        return {
            "packs_s": self.packs_s,
            "tokens_s": self.tokens_s,
            "target_packs_s": self.target_packs_s,
            "target_tokens_s": self.target_packs_s * tokens,
            "drafter_packs_s": self.drafter_packs_s,
            "drafter_tokens_s": self.drafter_packs_s * tokens,
            "wait_share": self.wait_share,
        }

    def seconds(self) -> dict[str, float]:
        """Mean seconds: of the drafter ranks by stage in this interval, of the target ranks by stage a pack."""
        mine = {f"drafter_{name}_s": float(self.drafter(name).mean()) for name in (*STAGES, "compile")}
        names = [name for name in STATS if name.endswith("_s")]
        theirs = {
            f"target_{name}": float(self.target(name).mean()) if self.targets[:, 0].any() else 0.0 for name in names
        }
        return {"interval_s": self.wall_s, **mine, **theirs}

    def sentence(self) -> str:
        """The account in one line."""
        spent = ", ".join(f"{name} {self.drafter(name).mean() / self.wall_s:.0%}" for name in STAGES)
        return f"drafter ranks: {spent}"

    def q_pre(self) -> list[float]:
        """Collated packs that wait at each target rank."""
        counts = np.maximum(self.targets[:, 0], 1.0)
        return (self.targets[:, 1 + STATS.index("q_pre")] / counts).tolist()

    def rate_of(self, targets: int, drafters: int) -> float:
        """Packs per second to expect of another split: each side grows with its ranks, the slower one decides."""
        split = self.split
        return min(
            self.target_packs_s * targets / split.num_targets, self.drafter_packs_s * drafters / split.num_drafters
        )

    def splits(self) -> list[tuple[int, int, float]]:
        """Target ranks, drafter ranks and expected packs per second of every split of as many ranks."""
        if self.split.colocated:
            return []
        ranks = self.split.world_size
        pairs = ((ranks - drafters, drafters) for drafters in range(1, ranks) if self.packs_per_step % drafters == 0)
        return [(targets, drafters, self.rate_of(targets, drafters)) for targets, drafters in pairs]


@dataclass(frozen=True)
class Verdict:
    """The name, why, and the one setting most likely to help (empty if there is none)."""

    name: str
    evidence: str
    advice: str = ""

    def __str__(self) -> str:
        """One sentence for the log."""
        return f"{self.name}: {self.evidence}" + (f"; {self.advice}" if self.advice else "")


COMPILING = "compiling"
# Of the first interval after a start: it waits for what goes on without a wait from then on.
STARTING = Verdict("starting", "the first line after a start also holds what the start cost")


def judge(seen: Accounts) -> Verdict:
    """The verdict of one interval."""
    compile_s, save_s = float(seen.drafter("compile").max()), float(seen.drafter("save").max())
    if compile_s > LARGE * seen.wall_s:
        return Verdict(COMPILING, f"{compile_s:.1f} s of {seen.wall_s:.1f} s", "normal at the start only")
    if save_s > LARGE * seen.wall_s:
        return Verdict("checkpoint", f"{save_s:.1f} s of {seen.wall_s:.1f} s", "raise checkpoint.interval")
    if seen.wait_share < WAITS or (seen.split.colocated and seen.drafter_packs_s < seen.target_packs_s):
        return _slow_drafters(seen)
    found = _slow_targets(seen)
    busy = seen.drafter("busy")
    if (busy >= 0).all() and busy.mean() < IDLE_GPU:
        return Verdict(
            f"starved GPU, {found.name}", f"drafter GPUs {busy.mean():.0%} busy; {found.evidence}", found.advice
        )
    return found


def _slow_drafters(seen: Accounts) -> Verdict:
    """The drafter ranks always have packs: what do they do with their time?"""
    other = seen.drafter("other")
    slow = _late_rank(-seen.drafter("agree"), seen.wall_s)  # the one that never waits where all others do
    rank = int(np.argmax(other)) if slow is None else slow
    name = f"drafter rank {seen.split.drafter_global(rank)}"
    if other[rank] > LARGE * seen.wall_s:
        share = other[rank] / seen.wall_s
        return Verdict("host-bound", f"{name} spends {share:.0%} of its time outside of packs and steps", HOST_ADVICE)
    if slow is not None:
        return Verdict("drafter-bound", f"{name} is slower than the others, which wait for it", "look at its device")
    launching = seen.on_gpu and float(seen.drafter("device").mean()) < LAUNCHES * seen.wall_s
    if launching and (mean_share(seen.drafter("busy")) or 0.0) < BUSY_GPU:
        told = "drafter ranks launch steps as long as their GPUs take for them" + _share(seen.drafter("busy"))
        return Verdict("host-bound", told, LAUNCH_ADVICE)
    each = seen.split.num_drafters / max(seen.drafter_packs_s, 1e-9)
    target = seen.split.num_targets / max(seen.target_packs_s, 1e-9)
    before = "; it lives on packs that were there before" if seen.target_packs_s < seen.drafter_packs_s else ""
    return Verdict(
        "drafter-bound",
        f"a drafter rank takes {each:.3g} s a pack, a target rank {target:.3g} s (in all {seen.drafter_packs_s:.3g} and"
        f" {seen.target_packs_s:.3g} packs/s){before}",
        _better(seen),
    )


def _slow_targets(seen: Accounts) -> Verdict:
    """The drafter ranks wait: what do the target ranks do meanwhile?"""
    waits = f"drafter ranks wait {seen.wait_share:.0%} of the time"
    if seen.split.colocated:
        data, forward = seen.target("data_s").mean(), seen.target("forward_s").mean()
        if data > forward:
            return Verdict("data-bound", f"{data:.3g} s a pack for data, {forward:.3g} s for the target", DATA_ADVICE)
        return Verdict("target-bound", f"the target takes {seen.wait_share:.0%} of the time")
    parts = {name: seen.target(f"{name}_s") for name in ("data", "forward", "other", "send")}
    # Behind its launches the host waits for a free buffer while the device is still at the forward.
    behind = np.maximum(seen.target("device_s") - parts["forward"], 0)
    launched = parts["forward"].mean()
    parts["forward"], parts["send"] = parts["forward"] + behind, np.maximum(parts["send"] - behind, 0)
    rounds = sum(parts.values()) + seen.target("agree_s")
    slow = _late_rank(parts["data"] + parts["other"], float(np.mean(rounds)))
    means = {name: float(part.mean() if slow is None else part[slow]) for name, part in parts.items()}
    who = "target ranks" if slow is None else f"target rank {slow}, for which the others wait,"
    kind = max(means, key=lambda name: means[name])
    q_pre = " ".join(f"{depth:.0f}" for depth in seen.target("q_pre"))
    told = f"{waits}; {who} spend {means[kind]:.3g} s a pack "
    if kind == "data":
        return Verdict("data-bound", f"{told}waiting for data (q_pre {q_pre})", DATA_ADVICE)
    if kind == "other":
        return Verdict("host-bound", f"{told}outside of data, forward and sending (q_pre {q_pre})", HOST_ADVICE)
    if kind == "send":
        return Verdict("channel-bound", f"{told}handing packs over that the drafters wait for", CHANNEL_ADVICE)
    launching = seen.target("device_s").any() and behind.mean() < WAITS * launched
    if launching and means["send"] < WAITS * launched and (mean_share(seen.target("busy")) or 0.0) < BUSY_GPU:
        told += "launching the forward, as long as their GPUs take for it" + _share(seen.target("busy"))
        return Verdict("host-bound", told, LAUNCH_ADVICE)
    return Verdict("target-bound", f"{told}in the target's forward (q_pre {q_pre})", _better(seen))


def mean_share(busy: Values) -> float | None:
    """How busy GPUs are, of those that tell."""
    known = busy[busy >= 0]
    return float(known.mean()) if len(known) else None


def _share(busy: Values) -> str:
    share = mean_share(busy)
    return "" if share is None else f" ({share:.0%} busy)"


LAUNCH_ADVICE = (
    "longer data.seq_len and more data.anchors_per_pack mean fewer launches a token; trainer.compile and target.compile"
    " if they are off"
)
DATA_ADVICE = "raise data.workers"
HOST_ADVICE = "look at that host: other processes, swapping, a debugger; fewer ranks on it"
CHANNEL_ADVICE = "raise channel.depth; look at the link between the hosts"


def _late_rank(own: Values, interval_s: float) -> int | None:
    """The rank that its own business keeps clearly longer than any other: they wait for it in the collectives."""
    if len(own) < 2 or float(own.max() - np.sort(own)[-2]) < SKEW * interval_s:
        return None
    return int(np.argmax(own))


def _better(seen: Accounts) -> str:
    """Another split, if one would be worth a restart."""
    splits = seen.splits()
    if not splits:
        return ""
    targets, drafters, rate = max(splits, key=lambda item: item[2])
    gain = rate / max(seen.packs_s, 1e-9)
    if gain < WORTH or (targets, drafters) == (seen.split.num_targets, seen.split.num_drafters):
        return ""
    return f"mesh.target={targets} mesh.drafter={drafters} would give about {gain:.1f}x"
