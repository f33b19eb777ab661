"""``dry_run=true``: what a job would hold and cost, worked out on meta tensors in one process."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_data.float8 import use_float8
from dflash_model import Drafter
from dflash_model.taps import decoder_layers, decoder_of
from dflash_train.describe import origin
from dflash_train.flops import pack_flops
from dflash_train.job import DTYPES, Job

GIB = 2**30
# Tensors of one layer's forward that autograd keeps per block slot, in widths of D (norms, attention in and out,
# residuals) and of the MLP (gate, up, their product). Counted from drafter.py; a plan, not a measurement.
KEPT_WIDTHS, KEPT_MLP = 8, 3
KEPT_CONVOLUTIONS = 4  # widths that DFlash2's four convolutions of a layer keep


@dataclass(frozen=True)
class Share:
    """What one rank of a role holds on its device, in bytes by purpose, and in pinned host memory."""

    device: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        """Device bytes."""
        return sum(self.device.values())

    def line(self) -> str:
        """Human-readable."""
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.device.items())
        return f"{self.total / GIB:.1f} GiB on its device ({parts}), {self.host / GIB:.2f} GiB of host memory"


def big(number: int) -> str:
    """``26.896 B``, ``134.5 M``, ``431 k``."""
    for unit, size, digits in (("B", 1e9, 3), ("M", 1e6, 1)):
        if number >= size:
            return f"{number / size:.{digits}f} {unit}"
    return f"{number / 1e3:.0f} k"


def count(module: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def held_bytes(module: nn.Module) -> int:
    """Bytes of the parameters, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def target_share(job: Job, built: PreTrainedModel) -> Share:
    """Estimate of one target rank."""
    config, size = job.config, DTYPES[job.config.target.dtype].itemsize
    decoder = decoder_of(built)
    if config.target.float8:
        use_float8(decoder)
    layers = [held_bytes(layer) for layer in decoder_layers(built)]
    whole, ranks = held_bytes(decoder), job.split.num_targets
    # FSDP prefetches one layer while another computes; the embedding is gathered with the root.
    gathered = whole if not config.target.reshard_after_forward else 2 * max(layers) + whole - sum(layers)
    goal = job.target.config
    row = config.data.seq_len * (6 * goal.hidden_size + 3 * goal.intermediate_size) * size
    message = job.layout().num_bytes
    return Share(
        {"weights": whole / ranks, "gathered": gathered if ranks > 1 else 0.0, "activations": row, "taps": 2 * message},
        host=0.0 if job.split.colocated else 2.0 * message,
    )


def drafter_share(job: Job, num_parameters: int) -> Share:
    """Estimate of one drafter rank."""
    config, drafter = job.config, job.drafter
    size, ranks = DTYPES[config.trainer.dtype].itemsize, job.split.num_drafters
    slots = config.data.anchors_per_pack * drafter.block_size
    widths = KEPT_WIDTHS + (KEPT_CONVOLUTIONS if drafter.dflash2 else 0)
    kept = slots * drafter.num_layers * (widths * drafter.hidden_size + KEPT_MLP * drafter.intermediate_size)
    if drafter.dflash2 is not None:  # vectors of the tokens before and of the candidates
        kept += slots * drafter.dflash2.selector_rank * (drafter.dflash2.selector_top_k + 3)
    keys = (config.data.seq_len + slots) * drafter.num_layers * 4 * drafter.num_kv_heads * drafter.head_dim
    ends = (1 if job.target.config.tie_word_embeddings else 2) * drafter.vocab_size * drafter.hidden_size
    float8 = 2 * drafter.vocab_size * drafter.hidden_size * config.loss.float8
    held = 2 * size if config.loss.kind == "ce" else 3 * size  # logits, their gradient, the target's logits
    held += 0 if config.trainer.compile else 4 * held // size  # uncompiled, steps between them are kept in fp32
    logits = min(config.loss.chunk_rows, slots) * drafter.vocab_size * held
    message = job.layout().num_bytes
    device = {
        "masters and moments": num_parameters * 4 * 3 / ranks,
        "gradients": num_parameters * 4 / ranks + num_parameters * (4 if job.micro_steps > 1 else size),
        "gathered weights": num_parameters * size,
        "embedding and head": ends * DTYPES[config.target.dtype].itemsize + float8,
        "activations": (kept + keys) * size,
        "logits": logits,
        "packs": 2 * message,
    }
    return Share(device, host=0.0 if job.split.colocated else config.channel.depth * message)


def report(job: Job) -> tuple[str, list[str]]:
    """The plan of a job as text, and what would not fit on a device, in sentences."""
    config, split = job.config, job.split
    model = job.target.build_meta(DTYPES[config.target.dtype])
    total = count(model)
    built = job.target.build_meta(DTYPES[config.target.dtype], max(job.tap_ids) + 1)
    cut = count(decoder_of(built))
    with torch.device("meta"):
        parts = Drafter(job.drafter)
    drafter = count(parts)
    shares = [("target", target_share(job, built)), ("drafter", drafter_share(job, drafter))]
    layers = job.target.config.num_hidden_layers
    lines = [
        f"ranks        {split.world_size}: {split.describe()}",
        f"target       {big(total)} parameters, {layers} layers; built up to tap"
        f" {max(job.tap_ids)}: {big(cut)} (head included: no)",
        f"drafter      {big(drafter)} parameters, {job.drafter.num_layers} layers, block"
        f" {job.drafter.block_size}, taps {list(job.drafter.target_layer_ids)}, mask id {job.drafter.mask_token_id}",
        f"             layers {', '.join(job.drafter.layer_types)}"
        + (f", window {job.drafter.sliding_window}" if job.drafter.sliding_window else ""),
        *_added(parts),
        f"             a new run starts {origin(job)}",
    ]
    for rank in range(split.world_size):
        roles = [
            name
            for name, index in (("target", split.target_rank(rank)), ("drafter", split.drafter_rank(rank)))
            if index is not None
        ]
        held = sum(share.total for name, share in shares if name in roles)
        lines.append(f"rank {rank:<8}{' and '.join(roles)}: {held / GIB:.1f} GiB")
    lines += [f"a {name} rank  {share.line()}" for name, share in shares]
    if config.mesh.target is None and config.mesh.drafter is None:
        lines.append("             (for other ranks, set mesh.target and mesh.drafter)")
    lines.append("             (activations are a plan from shapes, without allocator overhead)")
    copy = drafter * 4 * 3 / GIB
    lines.append(
        f"a checkpoint {copy + drafter * 2 / GIB:.1f} GiB in run.dir; while it is written, each drafter rank"
        f" holds {copy / split.num_drafters:.1f} GiB of host memory more"
    )
    lines += _work(job)
    limit = _limit(job)
    too_much = _too_much(job, shares, limit) if limit else []
    if limit and not too_much:
        lines.append(f"fits         in {limit:g} GiB a device")
    return "\n".join(lines), too_much


def _added(drafter: Drafter) -> list[str]:
    """Parameters of what DFlash2 adds."""
    selector = drafter.candidate_selector
    if selector is None:
        return []
    convolutions = sum(p.numel() for name, p in drafter.named_parameters() if "_conv." in name)
    projection = count(selector.hidden_projection)
    return [
        f"             DFlash2: convolutions {big(convolutions)}, codebooks {big(count(selector) - projection)}, their"
        f" projection {big(projection)} of these parameters"
    ]


def _work(job: Job) -> list[str]:
    config = job.config
    packs, seq_len = config.trainer.packs_per_step, config.data.seq_len
    flops = pack_flops(job.drafter, seq_len, config.data.anchors_per_pack)
    lines = [
        f"a step       {packs} packs of {seq_len} tokens and {config.data.anchors_per_pack} anchors,"
        f" {job.micro_steps} on each drafter rank; {flops / 1e12:.1f} TFLOP of drafter matrix products a pack",
        f"a pack       {job.layout().num_bytes / 2**20:.1f} MiB from target to drafter",
    ]
    if (job.data_dir / "ledger.json").is_file():
        rows = len(job.collator(job.open_data()).train_plan)
        lines.append(
            f"an epoch     {rows} packs, {rows / packs:.1f} steps; {config.trainer.steps} steps are"
            f" {config.trainer.steps * packs / rows:.2f} epochs"
        )
    else:
        lines.append(f"an epoch     unknown: data.path ({job.data_dir}) is not prepared yet")
    if config.trainer.expected_ktok_s:
        hours = config.trainer.steps * packs * seq_len / config.trainer.expected_ktok_s / 1e3 / 3600
        lines.append(
            f"time         {hours:.1f} hours, {hours * job.split.world_size:.1f} GPU-hours at"
            f" {config.trainer.expected_ktok_s:g} ktok/s, for {config.trainer.steps} steps"
        )
    else:
        lines.append("time         unknown: set trainer.expected_ktok_s")
    return lines


def _limit(job: Job) -> float | None:
    """GiB of a device: what is set, or of the one here."""
    if job.config.mesh.memory_gib is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / GIB
    return job.config.mesh.memory_gib


def _too_much(job: Job, shares: list[tuple[str, Share]], limit: float) -> list[str]:
    config = job.config
    whole = job.split.num_targets > 1 and not config.target.reshard_after_forward
    advice = {
        "target": "target.reshard_after_forward=true" if whole else "more target ranks (mesh.target)",
        "drafter": "more drafter ranks (mesh.drafter), fewer data.anchors_per_pack",
    }
    held = [(f"a {name} rank", share.total, advice[name]) for name, share in shares]
    if job.split.colocated:
        both = sum(share.total for _, share in shares)
        held = [("a rank with both roles", both, "more ranks, or ranks of its own for each role (mesh.*)")]
    return [
        f"mesh.memory_gib is {limit:g}; {who} would need {size / GIB:.1f} GiB: use {what}, or a smaller data.seq_len"
        for who, size, what in held
        if size / GIB > limit
    ]
