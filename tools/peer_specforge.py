"""Train a drafter with SpecForge 0.2.0's own step: python tools/peer_specforge.py specforge=DIR config=FILE key=value …

DIR holds the unpacked wheel. Everything that is not the drafter's step is this project's: the same packs 0, 1, 2, … of
the same data, the target's hidden states, AdamW with its schedule and clipping. So the drafter in run.dir/dflash
differs from that of tools/train.py by SpecForge's draft model, start weights, anchors and loss alone; its acceptance is
the peer's. One process, one device; no held-out packs, no resuming.

SpecForge's step takes [B, S] sequences whose positions count from 0 and whose blocks see all earlier tokens of their
row: it cannot be told of documents in a row. Each pack is therefore cut into its documents, which its own collator pads
to the longest, as it would batch them itself (documents without two neighbouring supervised tokens are left out, as
its loader does). It draws at most num_anchors from each sequence; for every pack that is the smallest number that gives
at least as many anchors in all as tools/train.py draws from the pack, and fewer than B more.

Legend: B documents of a pack, S tokens of the row, E = taps * target width.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import Qwen3Config

from dflash_data.clock import StageClock
from dflash_data.ends import FrozenEnds
from dflash_data.pipeline import MadePack, hidden_states
from dflash_data.target import ShardedTarget
from dflash_model import DrafterConfig, UserError, save_drafter
from dflash_model.blocks import default_gamma
from dflash_model.layout import to_published
from dflash_train.checkpoint import Position
from dflash_train.cli import parse, run_tool
from dflash_train.config import RunConfig, key
from dflash_train.job import DTYPES, Job, check_job
from dflash_train.metrics import append
from dflash_train.parallelize import fill_sharded, parallelize_drafter
from dflash_train.run import pick_device
from dflash_train.start import initial_tensors
from dflash_train.titan import apply_gradients, build_optimizer

MODULES = {
    "model": "algorithms.common.dflash_family_model", "data": "algorithms.common.dflash_family_data",
    "strategy": "training.strategies.base", "kernels": "modeling.draft.dflash_kernels",
    "contracts": "runtime.contracts",
}  # fmt: skip


@dataclass
class PeerOptions:
    """SpecForge's own settings."""

    specforge: str = key("", "folder of the unpacked SpecForge 0.2.0 wheel")
    chunk_blocks: int = key(0, "its objective_chunk_blocks (there 128): fewer logits at once, made twice; 0: all, once")
    liger: bool | None = key(None, "its Liger kernels; default: on a GPU if liger-kernel is installed")


@dataclass
class PeerConfig(PeerOptions, RunConfig):
    """A training job as tools/train.py takes it, done by SpecForge."""

    own_start: bool = key(True, "start from its own N(0, 0.02) weights; false: from those of tools/train.py")
    rounded_rope: bool = key(
        False, "train with rotary frequencies rounded to trainer.dtype, as SpecForge's launch does; servers' are exact"
    )


def import_specforge(folder: str) -> dict[str, Any]:
    """The modules of its step; they need no package beyond torch and transformers.

    Raises:
        UserError: it is not there.
    """
    root = Path(folder).expanduser().absolute()
    if not folder or not (root / "specforge" / "training").is_dir():
        raise UserError(f"specforge is {folder!r}; it takes the folder of the unpacked SpecForge 0.2.0 wheel")
    sys.path.insert(0, str(root))
    return {name: import_module(f"specforge.{module}") for name, module in MODULES.items()}


def check_peer(job: Job) -> None:
    """Refuse what SpecForge's step, or this tool, cannot do.

    Raises:
        UserError: the job asks for it.
    """
    drafter, path = job.drafter, job.config.target.path
    ends = (drafter.input_embedding_scale, drafter.output_multiplier, drafter.final_logit_softcapping)
    if ends != (1.0, 1.0, None) or drafter.is_causal is not None:
        raise UserError(f"target.path is {path}; SpecForge knows no embedding scale, logit factor or cap, no is_causal")
    if job.config.trainer.context_noise:
        raise UserError(f"trainer.context_noise is {job.config.trainer.context_noise}; SpecForge's step has none")
    if (job.config.loss.kind, job.config.loss.weighting) != ("ce", "decay"):
        raise UserError(
            "loss.kind and loss.weighting must be ce and decay; only these are compared with SpecForge's step"
        )
    if (job.run_dir / "dflash").exists():
        raise UserError(f"run.dir is {job.run_dir}; it holds a drafter already: choose another")


def has_liger(options: PeerOptions, device: torch.device) -> bool:
    """Whether its draft model gets Liger's norms and MLP.

    Raises:
        UserError: they are asked for where they cannot run.
    """
    possible = device.type == "cuda" and find_spec("liger_kernel") is not None
    if options.liger and not possible:
        raise UserError("liger is true; its kernels need a GPU and the package liger-kernel")
    return possible if options.liger is None else options.liger


def build_peer(
    peer: dict[str, Any], options: PeerOptions, drafter: DrafterConfig, ends: FrozenEnds, *, num_anchors: int,
    gamma: float,
) -> Any:  # noqa: ANN401  # fmt: skip
    """SpecForge's OnlineDFlashModel with the target's frozen ends; its draft model has fp32 masters like ours.

    SpecForge keeps bf16 weights beside the fp32 masters in its optimizer; FSDP2 over one rank computes the same.

    Args:
        peer: its modules.
        options: its settings.
        drafter: the draft model's sizes.
        ends: on the device, and in the dtype, that it computes in.
        num_anchors: it draws from each sequence, at most.
        gamma: decay length of its slot weights.

    Raises:
        UserError: a setting that it cannot follow.
    """
    if options.chunk_blocks < 0:
        raise UserError(f"chunk_blocks is {options.chunk_blocks}; it takes 0 or more")
    device, dtype = ends.embedding_VD.device, ends.embedding_VD.dtype
    backend, liger = "flex_attention" if device.type == "cuda" else "sdpa", has_liger(options, device)
    published = Qwen3Config(**to_published(drafter))
    published._attn_implementation = backend
    draft = peer["model"].DFlashDraftModel(published, peer["kernels"].load_liger_dflash_kernels() if liger else None)
    draft.to(device)
    parallelize_drafter(draft, DeviceMesh(device.type, [0]), dtype=dtype, compile_layers=False)
    embed, head = nn.Embedding.from_pretrained(ends.embedding_VD), nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(ends.head_VD, requires_grad=False)
    model = peer["model"].OnlineDFlashModel(
        draft, head, embed, drafter.mask_token_id, block_size=drafter.block_size, attention_backend=backend,
        num_anchors=num_anchors, loss_decay_gamma=gamma, objective_chunk_blocks=options.chunk_blocks,
    )  # fmt: skip
    print(f"SpecForge on {device.type}: {backend}, liger kernels {'on' if liger else 'off'}", file=sys.stderr)
    return model.train()


def peer_of_job(config: PeerConfig, job: Job, peer: dict[str, Any], device: torch.device) -> Any:  # noqa: ANN401
    """SpecForge's model for a training job, with its start weights."""
    dtype = DTYPES[config.trainer.dtype]
    gamma = config.loss.gamma if config.loss.gamma is not None else default_gamma(job.drafter.block_size)
    model = build_peer(
        peer, config, job.drafter, FrozenEnds.load(job.target, dtype=dtype, device=device),
        num_anchors=config.data.anchors_per_pack, gamma=gamma,
    )  # fmt: skip
    if config.rounded_rope:
        model.draft_model.rotary_emb.to(dtype)
    if config.drafter.init_from is not None or not config.own_start:
        start = initial_tensors(job.config.drafter, job.target, job.drafter, job.config.run.seed)
        fill_sharded(model.draft_model, start)
    return model


def learn(peer: dict[str, Any], strategy: Any, batch: dict[str, Tensor]) -> Any:  # noqa: ANN401
    """Forward, loss and backward of a batch; what its strategy returned.

    The gradients are those of the sum of weighted losses, to be normalised over the step as its TrainerCore does.
    """
    out = strategy.forward_loss(peer["contracts"].TrainBatch([], "dflash", batch))
    out.loss_terms[0].backward()
    return out


def documents(made: MadePack) -> tuple[list[dict[str, Tensor]], int]:
    """A pack's documents as SpecForge's loader has samples, and how many anchors it draws from each."""
    pack, samples, candidates = made.pack, [], []
    doc = pack.doc_S[pack.doc_S >= 0]
    tokens = {"input_ids": pack.input_ids_S.long(), "loss_mask": pack.loss_mask_S.long()}
    fields = {**tokens, "hidden_states": made.context_SE}
    rows = {name: field[: len(doc)].split(torch.bincount(doc).tolist()) for name, field in fields.items()}
    for number, mask in enumerate(rows["loss_mask"]):
        if count := int((mask[1:] * mask[:-1]).sum()):
            candidates.append(count)
            samples.append({name: row[number][None] for name, row in rows.items()})
    assert candidates, f"pack {pack.item.number} has no two neighbouring supervised tokens"
    goal = min(len(pack.anchor_A), sum(candidates))
    return samples, next(n for n in range(1, goal + 1) if sum(min(n, count) for count in candidates) >= goal)


def target_packs(job: Job, device: torch.device) -> Iterator[MadePack]:
    """The job's packs 0, 1, 2, … with the target's hidden states."""
    collator = job.collator(job.open_data())
    target = ShardedTarget(
        job.target, job.drafter.target_layer_ids, mesh=DeviceMesh(device.type, [0]),
        dtype=DTYPES[job.config.target.dtype], reshard=False,
    )  # fmt: skip
    if job.config.target.compile and device.type == "cuda":
        target.compile(job.config.data.seq_len)
    data = job.config.data
    return hidden_states(
        job.schedule(collator, Position()), collator, target, rank=0, num_targets=1, num_workers=data.workers,
        prefetch=data.prefetch, clock=StageClock(),
    )  # fmt: skip


def train(config: PeerConfig, job: Job, peer: dict[str, Any], device: torch.device) -> tuple[Any, float]:
    """All steps; the trained draft model, and the median over log intervals of document tokens per second."""
    torch.manual_seed(config.run.seed)  # of its start weights and anchors
    model = peer_of_job(config, job, peer, device)
    strategy, collate = peer["strategy"].DFlashTrainStrategy(model), peer["data"].build_collator()
    optimizers, schedule = build_optimizer(model.draft_model, config.optimizer, config.trainer.steps)
    packs, dtype, speeds = target_packs(job, device), DTYPES[config.trainer.dtype], [0.0]
    sums, tokens, began = torch.zeros(5, device=device), 0.0, time.perf_counter()
    for step in tqdm(range(1, config.trainer.steps + 1), desc="specforge", unit="step"):
        weight = torch.zeros((), device=device)
        for _ in range(config.trainer.packs_per_step):
            made = next(packs)
            samples, model.num_anchors = documents(made)
            batch = collate(samples)
            batch["hidden_states"] = batch["hidden_states"].to(dtype)
            out = learn(peer, strategy, batch)
            loss_sum, weight_sum = out.loss_terms
            weight += weight_sum
            sums += torch.stack((loss_sum.detach(), weight_sum, *out.ratio_metrics["acc"], torch.ones_like(weight)))
            tokens += made.stats["document_tokens"]
        norm, rate = apply_gradients(
            model.draft_model, optimizers, schedule, scale=1 / weight, max_norm=config.optimizer.max_grad_norm
        )
        if step == 1 or step % config.log.interval == 0 or step == config.trainer.steps:
            loss, total, right, supervised, count = sums.tolist()  # waits for the device
            speed = tokens / (time.perf_counter() - began)
            record = {"step": step, "loss": loss / total, "acc": right / supervised, "grad_norm": float(norm),
                      "lr": rate, "slots_per_pack": supervised / count, "tokens_s": speed}  # fmt: skip
            append(job.run_dir / "metrics.jsonl", record)
            tqdm.write(" ".join(f"{name} {value:.4g}" for name, value in record.items()), file=sys.stderr)
            speeds = [speed] if step == 1 else [*speeds, speed]
            sums, tokens, began = torch.zeros_like(sums), 0.0, time.perf_counter()
    return model.draft_model, statistics.median(speeds[1:] or speeds)  # the first one compiles


def main(argv: list[str]) -> int:
    """Check, train, save."""
    config = parse(PeerConfig, argv, __doc__ or "")
    config.evaluate.packs = 0
    peer, job = import_specforge(config.specforge), check_job(config, 1)
    check_peer(job)
    device = pick_device(job)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    (job.run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    draft, speed = train(config, job, peer, device)
    state = {name: tensor.full_tensor() for name, tensor in draft.state_dict().items()}
    save_drafter(state, job.drafter, job.run_dir / "dflash")
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    print(json.dumps({"drafter": str(job.run_dir / "dflash"), "tokens_s": round(speed, 1), "peak_gib": memory}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_tool(main)
