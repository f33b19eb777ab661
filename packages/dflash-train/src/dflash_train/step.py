"""One pack through the drafter: blocks, forward, head and loss, and what the metrics need.

Legend: S context tokens, A anchors, K block size, Q = A*K, D drafter width, R supervised slots, J candidates of a slot.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_data.ends import FrozenEnds
from dflash_data.float8 import Float8Head
from dflash_data.packs import HiddenPack, staged
from dflash_model import Drafter, DrafterConfig, DraftInputs
from dflash_model.attention import Mask
from dflash_model.dflash2 import CandidateSelector
from dflash_model.drafter import embed_block
from dflash_model.mask import dense_mask, sparse_mask
from dflash_model.stopwatch import Stopwatch, measured
from dflash_train.loss import (
    dpace_weights,
    frozen_head_candidates,
    frozen_head_choices,
    frozen_head_loss,
    selector_loss,
)


def draft_inputs(
    tensors: dict[str, Tensor], ends: FrozenEnds, config: DrafterConfig, dtype: torch.dtype, *, sparse: bool
) -> DraftInputs:
    """Blocks ``[anchor, MASK, …]``, their positions and masks.

    Args:
        tensors: fields of a pack on the device.
        ends: the target's embedding and head.
        config: the drafter.
        dtype: compute type.
        sparse: build BlockMasks for flex_attention, which is compiled for each row length, rather than dense masks.
    """
    anchor_A = tensors["anchor_A"].long()
    first_A = tensors["first_A"].long()
    num_anchors, block_size = len(anchor_A), config.block_size
    ids_AK = torch.full((num_anchors, block_size), config.mask_token_id, device=anchor_A.device)
    ids_AK[:, 0] = tensors["input_ids_S"][anchor_A]
    position_AK = tensors["position_S"][anchor_A][:, None] + torch.arange(block_size, device=anchor_A.device)
    build = sparse_mask if sparse else dense_mask
    context_len = len(tensors["input_ids_S"])
    masks: dict[str, Mask] = {
        kind: build(
            first_A[None], anchor_A[None], context_len, block_size,
            window=config.window(kind), causal=config.causal_in_block(kind),
        )
        for kind in sorted(set(config.layer_types))
    }  # fmt: skip
    return DraftInputs(
        embedding_BQD=embed_block(config, ids_AK.view(1, -1), ends.embedding_VD).to(dtype),
        context_BSE=tensors["context_SE"][None, :, : config.context_size].to(dtype),
        context_position_BS=tensors["position_S"][None],
        block_position_BQ=position_AK.view(1, -1),
        masks=masks,
    )


def add_noise(context_SE: Tensor, width: int, std: float, seed: int, number: int) -> None:
    """Add normal noise to the first ``width`` columns in place.

    It depends on the seed and the pack's number alone, not on the rank that the pack is trained on.
    """
    mixed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])  # a CPU's generator reads 32 bits
    generator = torch.Generator(context_SE.device).manual_seed(mixed)
    context_SE[:, :width] += torch.empty(
        len(context_SE), width, dtype=context_SE.dtype, device=context_SE.device
    ).normal_(0.0, std, generator=generator)


class Tally:
    """Sums for the metrics of one logging interval, on the device until they are read.

    Those of a step are counted when it is known that its gradients are finite.

    Layout of the vector: loss, weight, blocks, then K entries each of: right, supervised, right with all earlier
    slots right, supervised with all earlier slots right; for DFlash2, the selector's loss and the weight it has.
    """

    def __init__(self, block_size: int, device: torch.device, *, selector: bool = False) -> None:
        self.block_size = block_size
        self.sums = torch.zeros(3 + 4 * block_size + 2 * selector, dtype=torch.float64, device=device)
        self._step = torch.zeros_like(self.sums)

    @classmethod
    def of(cls, config: DrafterConfig, device: torch.device) -> "Tally":
        """For a drafter."""
        return cls(config.block_size, device, selector=config.dflash2 is not None)

    def commit(self, finite: Tensor) -> None:
        """Count the step under way, or drop it; ``finite`` stays on the device."""
        self.sums += torch.where(finite, self._step, 0)
        self._step.zero_()

    def add(
        self, loss_sum: Tensor, weight_sum: Tensor, right_AK: Tensor, supervised_AK: Tensor, *selector: Tensor
    ) -> None:
        """Add one pack; for DFlash2 with the sums of the selector's losses and of the weights they have."""
        run_AK = (right_AK | ~supervised_AK).long().cumprod(-1).bool()  # slot 0 is never supervised
        before_AK = torch.cat((torch.ones_like(run_AK[:, :1]), run_AK[:, :-1]), dim=1)
        eligible_AK = supervised_AK & before_AK
        head = torch.stack((loss_sum.double(), weight_sum.double(), supervised_AK[:, 1].sum().double()))
        slots = torch.stack([x.sum(0) for x in (right_AK, supervised_AK, right_AK & eligible_AK, eligible_AK)])
        self._step += torch.cat((head, slots.double().flatten(), *(part.double()[None] for part in selector)))

    @staticmethod
    def read(sums: list[float], block_size: int) -> dict[str, float]:
        """Names and values from (reduced) sums.

        ``acc`` is the share of supervised slots that are right; ``acc_k`` the same for slot k; ``acc_given_prefix_k``
        counts only blocks whose earlier slots are all right; ``streak`` is the mean run of right slots in a block,
        without the bonus token. A DFlash2 drafter is right where its selector is, after the text's own token;
        ``selector_loss`` is that of the slots whose token is among the candidates, ``selector_missed`` the share of the
        others by weight; ``loss`` is without it.
        """
        loss, weight, blocks = sums[:3]
        right, supervised, run, eligible = (sums[3 + i * block_size : 3 + (i + 1) * block_size] for i in range(4))
        values = {
            "loss": loss / weight if weight else float("nan"),
            "acc": sum(right) / max(sum(supervised), 1.0),
            "streak": sum(run) / max(blocks, 1.0),
        }
        for slot in range(1, block_size):
            values[f"acc_{slot}"] = right[slot] / max(supervised[slot], 1.0)
            values[f"acc_given_prefix_{slot}"] = run[slot] / max(eligible[slot], 1.0)
        for selected, among in [sums[3 + 4 * block_size :]] if len(sums) > 3 + 4 * block_size else []:
            values["selector_loss"] = selected / among if among else float("nan")
            values["selector_missed"] = 1 - among / weight if weight else float("nan")
        return values


@dataclass(frozen=True)
class Objective:
    """``loss.*`` of the configuration.

    Attributes:
        kind: ``ce``, or a distribution loss.
        dpace_alpha: D-PACE's, None for the pack's own weights.
        selector_weight: of the selector's loss beside this one, for DFlash2.
    """

    kind: str = "ce"
    dpace_alpha: float | None = None
    selector_weight: float = 1.0


@dataclass(frozen=True)
class DraftStep:
    """Forward and loss of one pack.

    Attributes:
        drafter: sharded or not.
        ends: the target's embedding and head.
        dtype: compute type.
        chunk_rows: slots whose logits exist at once.
        sparse: masks for flex_attention, for GPUs and rows of one length; dense ones otherwise.
        compiled: whether the loss between the head's two matrix products is compiled.
        objective: what is taught, and how slots are weighted.
        float8: the head in float8, for training; held-out text goes through ``ends``.
    """

    drafter: Drafter
    ends: FrozenEnds
    dtype: torch.dtype
    chunk_rows: int
    sparse: bool
    compiled: bool = False
    objective: Objective = Objective()
    float8: Float8Head | None = None

    def loss(self, pack: HiddenPack, tally: Tally, parts: Stopwatch | None = None) -> tuple[Tensor, Tensor]:
        """Sum of weighted losses (to be backpropagated) and sum of weights, both on the device.

        The supervised slots are known to the host, so only their rows go through the head and nothing waits for the
        device.

        Args:
            pack: what to train on.
            tally: gets the step's sums.
            parts: gets the times of ``forward`` and ``loss``.
        """
        device = pack.tensors["anchor_A"].device
        rows_R = staged(pack.host["weight_AK"].flatten().nonzero()[:, 0], device)
        weight_AK, label_AK, config = pack.tensors["weight_AK"], pack.tensors["label_AK"], self.drafter.config
        label_R, weight_R = label_AK.flatten()[rows_R].long(), weight_AK.flatten()[rows_R]
        selector, selected = self.drafter.candidate_selector, []
        with measured(parts, "forward"):
            hidden_QD = self._forward(pack.tensors)
        with measured(parts, "loss"):
            taught = label_R if self.objective.kind == "ce" else self._teacher(pack.tensors, rows_R)
            hidden_RD = hidden_QD[rows_R]
            head = frozen_head_loss(
                hidden_RD, self.float8 or self.ends.head_VD, taught, self.chunk_rows, kind=self.objective.kind,
                multiplier=config.output_multiplier, softcap=config.final_logit_softcapping, compiled=self.compiled,
                top_k=selector.top_k if selector else 0,
            )  # fmt: skip
            if self.objective.dpace_alpha is not None:
                weight_R = dpace_weights(
                    head.loss_R.detach(), rows_R, len(weight_AK), config.block_size, self.objective.dpace_alpha
                )
            loss_sum, weight_sum, choice_R = (weight_R * head.loss_R).sum(), weight_R.sum(), head.choice_R
            total = loss_sum
            if selector is not None:
                score_RJ = self._scores(selector, pack.tensors, rows_R, hidden_RD, (head.candidate_RJ, head.unary_RJ))
                selector_R, among_R = selector_loss(score_RJ, head.candidate_RJ, label_R)
                selected = [(weight_R * selector_R).sum(), (weight_R * among_R).sum()]
                total = loss_sum + self.objective.selector_weight * selected[0]
                choice_R = _best(score_RJ, head.candidate_RJ)
        right_AK = torch.zeros_like(label_AK, dtype=torch.bool)
        right_AK.view(-1)[rows_R] = choice_R == label_R
        tally.add(loss_sum.detach(), weight_sum, right_AK, weight_AK > 0, *(part.detach() for part in selected))
        return total, weight_sum

    def _scores(
        self, selector: CandidateSelector, tensors: dict[str, Tensor], rows_R: Tensor, hidden_RD: Tensor,
        candidates: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        """The selector's scores ``[R, J]`` after the text's own token before each slot.

        As long as a draft is right, this is what stands before the slot there too.
        """
        before_R = tensors["input_ids_S"][self._made_at(tensors, rows_R)]
        return selector(hidden_RD, before_R.long()[:, None], *candidates)[:, 0]

    def _made_at(self, tensors: dict[str, Tensor], rows_R: Tensor) -> Tensor:
        """Where the target makes the tokens of these slots: slot k of anchor a at position a + k - 1."""
        block_size = self.drafter.config.block_size
        return tensors["anchor_A"].long()[rows_R // block_size] + rows_R % block_size - 1

    def _teacher(self, tensors: dict[str, Tensor], rows_R: Tensor) -> Tensor:
        """The target's normed last hidden states that make the tokens of these slots, ``[R, D]``.

        They travel behind the drafter's context features.
        """
        assert self.ends.norm is not None
        width = self.drafter.config.context_size
        return self.ends.norm(tensors["context_SE"][self._made_at(tensors, rows_R), width:])

    @torch.no_grad()
    def choices(self, tensors: dict[str, Tensor], rows_R: Tensor) -> Tensor:
        """What is drafted at the chosen slots if all before them is right, no loss: for evaluation."""
        hidden_RD, selector = self._forward(tensors)[rows_R], self.drafter.candidate_selector
        if selector is None:
            return frozen_head_choices(hidden_RD, self.ends.head_VD, self.chunk_rows)
        candidates = frozen_head_candidates(
            self.drafter.config, hidden_RD, self.ends.head_VD, self.chunk_rows, selector.top_k
        )
        return _best(self._scores(selector, tensors, rows_R, hidden_RD, candidates), candidates[0])

    def _forward(self, tensors: dict[str, Tensor]) -> Tensor:
        return self.drafter(draft_inputs(tensors, self.ends, self.drafter.config, self.dtype, sparse=self.sparse))[0]


def _best(score_RJ: Tensor, candidate_RJ: Tensor) -> Tensor:
    """The candidate with the largest score."""
    return candidate_RJ.gather(1, score_RJ.argmax(-1, keepdim=True))[:, 0]
