"""Every setting of a training job, in sections; each key with its default and one line.

Dotted names (``trainer.packs_per_step``) are the same in YAML files, on the command line and in errors. Only the
tools see this module's whole tree; the code below them takes the values it needs.
"""

from dataclasses import dataclass, field
from typing import Any


def key(default: Any, text: str) -> Any:  # noqa: ANN401 - any type a setting can have
    """A field with its help line; mutable defaults are copied per instance."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class RunSection:
    """Where everything of one run goes."""

    dir: str = key("runs/demo", "run folder; an existing one is resumed by the same command")
    seed: int = key(0, "decides packing, order, anchors and initial weights")


@dataclass
class TargetSection:
    """The frozen model to speed up."""

    path: str | None = key(None, "hub name (Qwen/Qwen3-8B) or local folder, fine-tuned ones too")
    config: dict[str, Any] | None = key(
        None, "architecture inline (model_type: …); checked against target.path, or given random weights without it"
    )
    dtype: str = key("bfloat16", "bfloat16 or float32: type of its weights and of the hidden states")
    float8: bool = key(
        False, "keep and multiply its large matrices in float8 (e4m3, a scale for each row and each token)"
    )
    compile: bool = key(True, "torch.compile its layers (on a GPU; gated delta nets stay as they are)")
    reshard_after_forward: bool = key(
        True, "free each layer's gathered weights after use; false costs memory and saves gathers"
    )
    template_options: dict[str, Any] = key({}, "passed to its chat template everywhere, such as enable_thinking: false")
    tokenizer: str | None = key(None, "folder or hub name of the tokenizer; default: target.path")


@dataclass
class DrafterSection:
    """The model to train; what is not set follows the target."""

    kind: str | None = key(
        None,
        "dflash; or dflash2: convolutions along the block, and a selector among each slot's likeliest tokens; default:"
        " what init_from is, else dflash. A dflash drafter given as init_from begins as the dflash2 one it drafts like",
    )
    init_from: str | None = key(
        None,
        "start from this drafter's weights (folder with config.json and model.safetensors); its shape holds, and the"
        " other drafter keys must agree with it or be left out",
    )
    init_from_target: bool = key(
        False, "start as the target's last layers, attention and MLP each where it has the drafter's shapes"
    )
    num_layers: int | None = key(None, "decoder layers; default: 5")
    num_taps: int | None = key(None, "tapped target layers, spread by the published rule; default: num_layers")
    target_layer_ids: list[int] | None = key(None, "tapped target layers, 0-based outputs; overrides num_taps")
    block_size: int | None = key(None, "tokens of a block, the anchor included; default: 16")
    mask_token_id: int | None = key(None, "vocabulary id of the mask slots; default: a spare or reserved one")
    hidden_size: int | None = key(None, "must equal the target's, which is the default")
    intermediate_size: int | None = key(None, "MLP width; default: the target's")
    num_heads: int | None = key(None, "attention heads; default: the target's")
    num_kv_heads: int | None = key(None, "key/value heads; default: the target's")
    head_dim: int | None = key(None, "head size; default: the target's")
    rope_theta: float | None = key(None, "rotary base; default: the target's")
    num_sliding_layers: int | None = key(
        None,
        "this many layers from the first are sliding (causal in the block, except in new dflash2 drafters), the rest"
        " full; default: 0",
    )
    sliding_window: int | None = key(None, "tokens a sliding layer sees back")
    conv_kernel_size: int | None = key(None, "dflash2: slots a convolution sums over, itself included; default: 2")
    conv_group_size: int | None = key(None, "dflash2: channels whose kernel a slot changes alike; default: 16")
    selector_rank: int | None = key(None, "dflash2: width of the selector's codebooks; default: 256")
    selector_top_k: int | None = key(None, "dflash2: tokens the selector chooses among; default: 16")


@dataclass
class DataSection:
    """The tokenized dataset and how it is cut into packs."""

    path: str = key("data/demo", "prepared dataset (tools/prepare.py writes it)")
    sources: list[str] = key(
        [],
        "for tools/prepare.py: JSONL, JSON (.gz, .zst), Parquet, datasets folders or hub names: a.jsonl,b.parquet",
    )
    weights: list[float] = key([], "how often each source's conversations stand in an epoch; default: 1 each")
    max_rows: list[int] = key([], "rows read of each source at most; default: all (0)")
    too_long: str = key(
        "turn", "conversations longer than seq_len: turn ends them after the last answer that fits, cut anywhere, drop"
    )
    turns: str = key("all", "assistant turns that carry loss: all or last")
    train_on_reasoning: bool = key(True, "whether reasoning carries loss")
    max_bad_rows: int | None = key(None, "more dropped rows than this are an error; default: any number, all counted")
    prepare_workers: int = key(0, "processes that tokenize; 0: one for each core")
    heldout_ratio: float = key(0.02, "share of the sources' conversations that tools/prepare.py holds out")
    heldout_sources: list[str] = key(
        [], "files like data.sources, held out as a whole, beside data.heldout_ratio of these"
    )
    seq_len: int = key(4096, "tokens of a row, a multiple of 128")
    anchors_per_pack: int = key(512, "blocks drawn from each row; times drafter.block_size a multiple of 128")
    workers: int = key(2, "threads that collate packs on each target rank")
    prefetch: int = key(8, "collated packs kept ready on each target rank (q_pre counts those in the workers too)")
    synthetic_documents: int = key(
        0, "write this many random documents to data.path instead of needing a prepared dataset"
    )
    synthetic_length: int = key(96, "tokens of the longest of these documents; the shortest has a quarter")


@dataclass
class TrainerSection:
    """The length and arithmetic of the run."""

    steps: int = key(0, "optimizer steps; must be given")
    packs_per_step: int = key(
        12, "packs in one optimizer step over all drafter ranks; the number of drafter ranks must divide it"
    )
    dtype: str = key("bfloat16", "bfloat16 or float32: type of the drafter's compute; its weights and moments are fp32")
    context_noise: float = key(
        0.0, "standard deviation of noise on the target's hidden states, decaying linearly to 0 over the steps"
    )
    max_skipped_steps: int = key(
        20, "this many steps in a row whose gradients are not finite (each is skipped) stop the run"
    )
    compile: bool = key(True, "torch.compile each drafter layer, and on a GPU the loss (needs one to pay)")
    activation_budget: float = key(
        0.9, "share of activations that compiled layers keep; 0 computes all but their inputs again, for long rows"
    )
    flash_attention: bool = key(
        False,
        "the drafter's attention by the kernels of flash-attn-4, on Hopper GPUs: faster, and the last bits of gradients"
        " differ from run to run (docs/performance.md)",
    )
    expected_ktok_s: float | None = key(
        None, "expected speed: for dry_run hours and GPU-hours, and an alarm at less than half of it"
    )


@dataclass
class OptimizerSection:
    """AdamW with warmup and cosine decay; norms, and dflash2's codebooks and base kernels, are not decayed."""

    lr: float = key(6e-4, "peak learning rate")
    beta1: float = key(0.9, "AdamW beta1")
    beta2: float = key(0.999, "AdamW beta2")
    weight_decay: float = key(0.0, "AdamW weight decay of matrices")
    warmup_ratio: float = key(0.04, "share of steps that warm up linearly")
    min_lr_ratio: float = key(0.0, "learning rate at the end, as a share of the peak")
    max_grad_norm: float = key(1.0, "gradient norm is clipped to this")


@dataclass
class LossSection:
    """What a slot is taught through the frozen head, and how much it counts."""

    kind: str = key(
        "ce",
        "ce: the text's token; kl, tv or lk: the target's distribution (lk goes from kl to tv as they come to overlap),"
        " for which the target runs to its last layer and one more hidden state travels",
    )
    weighting: str = key("decay", "of slots: decay, by gamma; dpace, by how likely the slots before are accepted (ce)")
    gamma: float | None = key(None, "decay length of the slot weights; default: 7 at block 16, 5 at 10, 4 at 8")
    dpace_alpha: float = key(0.5, "dpace: at 0 the drafter's own probabilities alone, at 1 none of them")
    chunk_rows: int = key(1024, "slots whose logits exist at once")
    float8: bool = key(
        False,
        "multiply with the frozen head in float8, both ways; takes the memory of a second head",
    )
    selector_weight: float = key(
        1.0, "dflash2: of the cross-entropy of the selector, over the slots whose token is among its candidates"
    )


@dataclass
class MeshSection:
    """Which ranks do what; left out, it follows the number of ranks."""

    target: int | None = key(None, "ranks 0 … target-1 hold the target")
    drafter: int | None = key(None, "the ranks after them hold the drafter")
    colocated: bool | None = key(None, "every rank holds both")
    device: str = key("auto", "cpu, cuda or auto")
    memory_gib: float | None = key(None, "memory of one device, for dry_run; default: that of the GPU here, if any")


@dataclass
class ChannelSection:
    """Hidden states from target to drafter ranks."""

    depth: int = key(4, "packs each drafter rank has asked for and not yet used (q_hs)")
    timeout_seconds: float = key(300.0, "a peer silent for longer is an error")
    start_timeout_seconds: float = key(
        1800.0, "the same until the first step is through: loading and compiling take time"
    )


@dataclass
class CheckpointSection:
    """Drafter weights, moments and step."""

    interval: int = key(500, "steps between checkpoints, and the last step; 0: only where the run is stopped")
    keep: int = key(2, "newest checkpoints kept, beside the milestones and the best by held-out acceptance")
    milestone_interval: int = key(0, "checkpoints at multiples of this many steps stay for good; 0: none")


@dataclass
class ResumeSection:
    """Going on with the run in run.dir."""

    allow: list[str] = key([], "settings that may differ from the checkpoint's, by name: trainer.steps,optimizer.lr")


@dataclass
class EvaluateSection:
    """Acceptance length on the held-out rows."""

    interval: int = key(500, "steps between evaluations; also before the first step and after the last")
    packs: int = key(64, "held-out rows per evaluation at most; 0 for none")


@dataclass
class ProfileSection:
    """Traces for Perfetto (ui.perfetto.dev)."""

    steps: list[int] = key([], "steps that the first drafter rank traces, into run.dir/profile")


@dataclass
class LogSection:
    """What is written while training."""

    interval: int = key(10, "steps between status lines and TensorBoard points")


@dataclass
class RunConfig:
    """A training job."""

    config: str = key("", "YAML file that the other keys override")
    dry_run: bool = key(False, "build everything on meta, print sizes and memory, train nothing")
    run: RunSection = field(default_factory=RunSection)
    target: TargetSection = field(default_factory=TargetSection)
    drafter: DrafterSection = field(default_factory=DrafterSection)
    data: DataSection = field(default_factory=DataSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    loss: LossSection = field(default_factory=LossSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    channel: ChannelSection = field(default_factory=ChannelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    resume: ResumeSection = field(default_factory=ResumeSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    log: LogSection = field(default_factory=LogSection)
    profile: ProfileSection = field(default_factory=ProfileSection)
