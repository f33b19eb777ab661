"""What DFlash2 adds to a drafter: convolutions along the block, and a selector among each slot's likeliest tokens.

DFlash drafts all slots at once, so none knows what its neighbour chose. Around attention and MLP a slot now sees the
slots before it, and behind the head a walk from the anchor chooses each token by what stood before it. Both are
nothing to begin with (``start_value``): a DFlash drafter that gets them drafts what it drafted.

Legend: B batch, A blocks, K block size, Q = A*K block slots, D drafter width, T taps of a kernel, G groups of W
channels (D = G*W); R slots, P predecessors asked about, J candidates of a slot, F rank of the codebooks, V vocabulary.
Source: z-lab dflash 0.1.0, ``GroupedDynamicCausalConv`` and ``CandidateSelector``; parameter names are those of the
published checkpoints.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_model.config import DFlash2Config, DrafterConfig
from dflash_model.sampling import draw


class BlockConvolution(nn.Module):
    """A sublayer between two convolutions along the block, which see no other block and no context.

    A slot becomes a weighted sum of itself and the slots before it. The weights of each channel are learnt, and each
    slot adds its own to them, one for all channels of a group; one projection of what goes into the sublayer gives
    these for both sides.
    """

    def __init__(self, config: DrafterConfig, added: DFlash2Config) -> None:
        super().__init__()
        self.block_size, self.num_taps = config.block_size, added.conv_kernel_size
        self.num_groups = config.hidden_size // added.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.num_taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.num_taps * self.num_groups, bias=False)

    def forward(self, x_BQD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Convolve, run the sublayer, convolve."""
        own_BQ2TG = self.kernel_projection(x_BQD).unflatten(-1, (2, self.num_taps, self.num_groups))
        before_TD, behind_TD = self.base_kernel.unbind()
        out_BQD = sublayer(self._convolve(x_BQD, before_TD, own_BQ2TG[:, :, 0]))
        return self._convolve(out_BQD, behind_TD, own_BQ2TG[:, :, 1])

    def _convolve(self, x_BQD: Tensor, base_TD: Tensor, own_BQTG: Tensor) -> Tensor:
        x_BAKGW = x_BQD.unflatten(1, (-1, self.block_size)).unflatten(-1, (self.num_groups, -1))
        own_BAKTG = own_BQTG.unflatten(1, (-1, self.block_size))
        base_TGW = base_TD.unflatten(-1, (self.num_groups, -1))
        out_BAKGW = torch.addcmul(base_TGW[0] * x_BAKGW, own_BAKTG[..., 0, :, None], x_BAKGW)
        for tap in range(1, self.num_taps):
            earlier_BAKGW = F.pad(x_BAKGW[:, :, :-tap], (0, 0, 0, 0, tap, 0))  # zeros before the block
            fixed_BAKGW = out_BAKGW + base_TGW[tap] * earlier_BAKGW
            out_BAKGW = torch.addcmul(fixed_BAKGW, own_BAKTG[..., tap, :, None], earlier_BAKGW)
        return out_BAKGW.flatten(3).flatten(1, 2)


def convolved(convolution: BlockConvolution | None, x_BQD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """A sublayer, with its convolutions if the drafter has any."""
    return sublayer(x_BQD) if convolution is None else convolution(x_BQD, sublayer)


class CandidateSelector(nn.Module):
    """Scores a slot's candidates by their own logits and by how well they follow the token before.

    Two codebooks hold a vector for each token, as the one before and as the one that follows; the slot's hidden state
    weighs their elements.
    """

    def __init__(self, config: DrafterConfig, added: DFlash2Config) -> None:
        super().__init__()
        self.top_k = added.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, added.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, added.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, added.selector_rank, bias=False)

    def forward(self, hidden_RD: Tensor, predecessor_RP: Tensor, candidate_RJ: Tensor, unary_RJ: Tensor) -> Tensor:
        """Scores ``[R, P, J]`` of every candidate after every predecessor.

        Args:
            hidden_RD: drafter outputs of the slots.
            predecessor_RP: tokens that may stand before each slot.
            candidate_RJ: tokens to score.
            unary_RJ: their logits, after factor and cap.
        """
        seen_RPF = F.embedding(predecessor_RP, self.predecessor_codebook) * self.hidden_projection(hidden_RD)[:, None]
        return unary_RJ[:, None] + seen_RPF @ F.embedding(candidate_RJ, self.successor_codebook).mT

    def walk(
        self,
        hidden_RD: Tensor,
        candidate_RJ: Tensor,
        unary_RJ: Tensor,
        anchor: Tensor,
        temperature: float,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the tokens of a block's slots 1 to K - 1 from left to right, each after the one chosen before it.

        Args:
            hidden_RD: drafter outputs of these slots, in order.
            candidate_RJ: their candidates.
            unary_RJ: the candidates' logits.
            anchor: the token before the first of them, a scalar.
            temperature: divides the scores; 0 takes the largest.
            generator: source of randomness.

        Returns:
            The tokens ``[R]``, and the fp32 distributions over the candidates that they were drawn from (None at 0).
        """
        previous_RJ = torch.cat((anchor.expand(1, candidate_RJ.shape[1]), candidate_RJ[:-1]))
        at, path, q = torch.zeros(1, dtype=torch.long, device=anchor.device), [], []
        for score_JJ in self(hidden_RD, previous_RJ, candidate_RJ, unary_RJ):
            score_1J = score_JJ.index_select(0, at)
            if temperature == 0:
                at = score_1J.argmax(-1)
            else:
                q.append((score_1J.float() / temperature).softmax(-1))
                at = draw(q[-1], generator)
            path.append(at)
        return candidate_RJ.gather(1, torch.stack(path))[:, 0], torch.cat(q) if q else None


def start_value(name: str, shape: torch.Size) -> Tensor | None:
    """Start values of the parameters that keep DFlash2's parts from changing anything; None for all others."""
    if name.endswith("base_kernel"):
        kernel = torch.zeros(shape)
        kernel[:, 0] = 1
        return kernel
    return torch.zeros(shape) if name.endswith(("kernel_projection.weight", "successor_codebook")) else None
