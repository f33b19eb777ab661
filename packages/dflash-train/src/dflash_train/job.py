"""A checked job: the configuration, and everything derived from it before any rank does work."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_data.dataset import PreparedData, open_prepared
from dflash_data.ends import find_final_norm
from dflash_data.float8 import ALIGNED
from dflash_data.packs import Collator, PackLayout
from dflash_data.schedule import Schedule
from dflash_data.target import TargetModel, find_target
from dflash_model import DrafterConfig, UserError
from dflash_model.attention import check_flash, check_flash_heads
from dflash_model.blocks import anchor_candidates, default_gamma
from dflash_model.layout import to_published
from dflash_model.mask import TILE
from dflash_train.checkpoint import Position
from dflash_train.config import LossSection, RunConfig, TrainerSection
from dflash_train.drafter_config import drafter_config
from dflash_train.loss import ROW_LOSSES
from dflash_train.mesh import Split, make_split
from dflash_train.start import BorrowedLayers

MOST_DECAY = 60.0  # exp(-60) is nothing beside 1; fp32 holds exp(-87)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def dtype_of(key: str, value: str) -> torch.dtype:
    """A dtype by name.

    Raises:
        UserError: it is neither bfloat16 nor float32.
    """
    if value not in DTYPES:
        raise UserError(f"{key} is {value!r}; it takes {' or '.join(DTYPES)}")
    return DTYPES[value]


@dataclass(frozen=True)
class Job:
    """What a run is.

    Attributes:
        config: the settings.
        split: which ranks do what.
        target: the frozen model.
        drafter: the model to train.
    """

    config: RunConfig
    split: Split
    target: TargetModel
    drafter: DrafterConfig

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.config.run.dir).expanduser()

    @property
    def data_dir(self) -> Path:
        """The prepared dataset."""
        return Path(self.config.data.path).expanduser()

    @property
    def micro_steps(self) -> int:
        """Packs each drafter rank accumulates per step."""
        return self.config.trainer.packs_per_step // self.split.num_drafters

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs travel: the drafter's, and the last one if its distribution is taught."""
        last = (self.drafter.num_target_layers - 1,) if self.config.loss.kind != "ce" else ()
        return self.drafter.target_layer_ids + last

    def layout(self) -> PackLayout:
        """How packs travel."""
        data = self.config.data
        return PackLayout(
            data.seq_len,
            data.anchors_per_pack,
            self.drafter.block_size,
            len(self.tap_ids) * self.drafter.hidden_size,
            DTYPES[self.config.target.dtype],
        )

    def open_data(self) -> PreparedData:
        """The dataset, checked against row length, vocabulary and the options of the chat template.

        Raises:
            UserError: it was prepared for another job.
        """
        data = open_prepared(self.data_dir, seq_len=self.config.data.seq_len, vocab_size=self.drafter.vocab_size)
        prepared, asked = data.ledger.settings.get("recipe"), self.config.target.template_options
        if prepared is not None and asked and asked != prepared["options"]:
            raise UserError(
                f"target.template_options is {asked}; data.path ({self.data_dir}) was prepared under"
                f" {prepared['options']}: prepare it again, or give the same"
            )
        return data

    def collator(self, data: PreparedData) -> Collator:
        """Work items to token packs."""
        section, block_size = self.config.data, self.drafter.block_size
        gamma = self.config.loss.gamma if self.config.loss.gamma is not None else default_gamma(block_size)
        return Collator(
            data, seq_len=section.seq_len, num_anchors=section.anchors_per_pack, block_size=block_size, gamma=gamma,
            seed=self.config.run.seed,
            heldout_limit=self.config.evaluate.packs,
        )  # fmt: skip

    def heldout_packs(self, collator: Collator) -> int:
        """Packs of one evaluation, filled up with empty ones so that every drafter rank has as many."""
        return -(-collator.num_heldout // self.split.num_drafters) * self.split.num_drafters

    def heldout_chunks(self, collator: Collator) -> int:
        """Drafter forwards one held-out pack needs so that each of its anchors is drafted once."""
        most = 0
        for number in range(collator.num_heldout):
            documents = (collator.data.heldout[index] for index in collator.heldout_plan.documents(number))
            most = max(most, sum(len(anchor_candidates(mask, 0 * ids)) for ids, mask in documents))
        return -(-most // self.config.data.anchors_per_pack)

    def schedule(self, collator: Collator, position: Position) -> Schedule:
        """The numbered sequence of the whole job, from where it stands."""
        return Schedule(
            start_step=position.step,
            start_pack=position.packs,
            evaluated=position.evaluated,
            num_steps=self.config.trainer.steps,
            packs_per_step=self.config.trainer.packs_per_step,
            heldout_packs=self.heldout_packs(collator),
            evaluate_interval=self.config.evaluate.interval,
        )

    def identity(self, fingerprint: str) -> dict[str, Any]:
        """What decides the packs and losses of a run; the split is not among it."""
        config = self.config
        return {
            "trainer.packs_per_step": config.trainer.packs_per_step,
            "trainer.steps": config.trainer.steps,
            "data.seq_len": config.data.seq_len,
            "data.anchors_per_pack": config.data.anchors_per_pack,
            "run.seed": config.run.seed,
            "data.fingerprint": fingerprint,
            "target": self.target.name,
            "target.files": self.target.fingerprint(),
            "target.dtype": config.target.dtype,
            "target.float8": config.target.float8,
            "trainer.dtype": config.trainer.dtype,
            "trainer.context_noise": config.trainer.context_noise,
            "evaluate.packs": config.evaluate.packs,
            **{f"loss.{name}": value for name, value in asdict(config.loss).items() if name != "chunk_rows"},
            **{f"optimizer.{name}": value for name, value in asdict(config.optimizer).items()},
            "drafter": to_published(self.drafter),
        }


def check_job(config: RunConfig, world_size: int | None) -> Job:
    """Everything that can be checked before the ranks meet.

    Args:
        config: the settings.
        world_size: ranks of the running job; None for those that ``mesh.*`` names, which is a dry run.

    Raises:
        UserError: one sentence with the key, the value and what is allowed.
    """
    split = make_split(config.mesh, world_size)
    _check_numbers(config)
    _check_choices(config)
    _check_packs_per_step(config, split)
    described, dry = config.target.config is not None, config.dry_run or world_size is None
    path = None if dry and described else config.target.path  # a dry run needs no checkpoint
    target = find_target(path, config.target.config)
    drafter = drafter_config(config.drafter, target, config.target.tokenizer)
    if (config.data.anchors_per_pack * drafter.block_size) % TILE:
        raise UserError(
            f"data.anchors_per_pack ({config.data.anchors_per_pack}) x drafter.block_size ({drafter.block_size})"
            f" must be a multiple of {TILE}"
        )
    gamma, last = config.loss.gamma, drafter.block_size - 2
    if gamma is not None and last > MOST_DECAY * gamma:
        raise UserError(
            f"loss.gamma is {gamma}; the last slots of a block would weigh nothing: it takes"
            f" {last / MOST_DECAY:.2g} or more"
        )
    if config.loss.float8 and (drafter.vocab_size % ALIGNED or drafter.hidden_size % ALIGNED):
        raise UserError(
            f"loss.float8 is true; the head is {drafter.vocab_size} x {drafter.hidden_size}, and float8 products take"
            f" multiples of {ALIGNED}"
        )
    if config.trainer.flash_attention:
        check_flash_heads("trainer.flash_attention", DTYPES[config.trainer.dtype], drafter.head_dim)
    if drafter.dflash2 is None and config.loss.selector_weight != 1:
        raise UserError(
            f"loss.selector_weight is {config.loss.selector_weight}; only a drafter of drafter.kind=dflash2 has a"
            " selector"
        )
    if config.loss.kind != "ce":
        find_final_norm(target, DTYPES[config.target.dtype])
    if config.drafter.init_from_target:
        _check_borrowing(config, target, drafter)
    job = Job(config, split, target, drafter)
    if not dry and not config.data.synthetic_documents:
        job.open_data()
    return job


def _check_borrowing(config: RunConfig, target: TargetModel, drafter: DrafterConfig) -> None:
    if config.drafter.init_from is not None:
        raise UserError(
            f"drafter.init_from_target is true and drafter.init_from is {config.drafter.init_from}; a drafter starts"
            " from one of them"
        )
    BorrowedLayers(target, drafter)


def check_row_length(seq_len: int) -> None:
    """Rows are cut into tiles of the attention mask.

    Raises:
        UserError: they cannot be.
    """
    if seq_len < TILE or seq_len % TILE:
        raise UserError(f"data.seq_len is {seq_len}; it must be a multiple of {TILE}")


def _check_numbers(config: RunConfig) -> None:
    check_row_length(config.data.seq_len)
    positive = {
        "trainer.steps": config.trainer.steps,
        "trainer.packs_per_step": config.trainer.packs_per_step,
        "trainer.max_skipped_steps": config.trainer.max_skipped_steps,
        "data.anchors_per_pack": config.data.anchors_per_pack,
        "data.synthetic_length": config.data.synthetic_length,
        "data.workers": config.data.workers,
        "data.prefetch": config.data.prefetch,
        "channel.depth": config.channel.depth,
        "checkpoint.keep": config.checkpoint.keep,
        "evaluate.interval": config.evaluate.interval,
        "log.interval": config.log.interval,
        "loss.chunk_rows": config.loss.chunk_rows,
    }
    for name, value in positive.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if config.trainer.expected_ktok_s is not None and not config.trainer.expected_ktok_s > 0:
        raise UserError(f"trainer.expected_ktok_s is {config.trainer.expected_ktok_s:g}; it must be more than 0")
    for name, value in (
        ("run.seed", config.run.seed),
        ("evaluate.packs", config.evaluate.packs),
        ("checkpoint.interval", config.checkpoint.interval),
        ("checkpoint.milestone_interval", config.checkpoint.milestone_interval),
        ("trainer.context_noise", config.trainer.context_noise),
        ("loss.selector_weight", config.loss.selector_weight),
    ):
        if not 0 <= value < math.inf:
            raise UserError(f"{name} is {value}; it must be 0 or more")
    for name, value in (
        ("optimizer.lr", config.optimizer.lr),
        ("channel.timeout_seconds", config.channel.timeout_seconds),
        ("channel.start_timeout_seconds", config.channel.start_timeout_seconds),
        ("loss.gamma", config.loss.gamma if config.loss.gamma is not None else 1.0),
        ("optimizer.max_grad_norm", config.optimizer.max_grad_norm),
    ):
        if not 0 < value < math.inf:
            raise UserError(f"{name} is {value}; it must be positive")
    if config.checkpoint.milestone_interval and not config.checkpoint.interval:
        raise UserError(
            f"checkpoint.interval is 0 and checkpoint.milestone_interval {config.checkpoint.milestone_interval};"
            " milestones are checkpoints: give checkpoint.interval"
        )


def _check_choices(config: RunConfig) -> None:
    for name, value in (("target.dtype", config.target.dtype), ("trainer.dtype", config.trainer.dtype)):
        dtype_of(name, value)
    _check_loss(config.loss)
    shares = {
        "loss.dpace_alpha": config.loss.dpace_alpha,
        "trainer.activation_budget": config.trainer.activation_budget,
    }
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise UserError(f"{name} is {value}; it takes 0 to 1")
    budget = config.trainer.activation_budget
    if budget != TrainerSection().activation_budget and not config.trainer.compile:
        raise UserError(
            f"trainer.activation_budget is {budget} and trainer.compile false; only compiled layers compute again"
        )
    if config.trainer.flash_attention and config.mesh.device == "cpu":
        check_flash("trainer.flash_attention", torch.device("cpu"))
    if config.mesh.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"mesh.device is {config.mesh.device!r}; it takes auto, cpu or cuda")


def _check_loss(loss: LossSection) -> None:
    if loss.kind not in ROW_LOSSES:
        raise UserError(f"loss.kind is {loss.kind!r}; it takes {', '.join(ROW_LOSSES)}")
    if loss.weighting not in ("decay", "dpace"):
        raise UserError(f"loss.weighting is {loss.weighting!r}; it takes decay or dpace")
    if loss.weighting == "dpace" and loss.kind != "ce":
        raise UserError(f"loss.weighting is dpace and loss.kind {loss.kind}; dpace is only defined for ce")
    if loss.weighting != "dpace" and loss.dpace_alpha != LossSection().dpace_alpha:
        raise UserError(f"loss.dpace_alpha is {loss.dpace_alpha}; only loss.weighting=dpace has it")
    if loss.weighting == "dpace" and loss.gamma is not None:
        raise UserError(f"loss.gamma is {loss.gamma}; only loss.weighting=decay has it")


def _check_packs_per_step(config: RunConfig, split: Split) -> None:
    packs, drafters = config.trainer.packs_per_step, split.num_drafters
    if packs % drafters:
        below, above = packs // drafters * drafters, (packs // drafters + 1) * drafters
        near = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"trainer.packs_per_step is {packs}; {drafters} drafter ranks share the packs of a step evenly, so it"
            f" must be a multiple of {drafters} (nearest: {near})"
        )
