"""Speculative decoding with a DFlash drafter, in plain PyTorch.

One round: the drafter proposes K - 1 tokens after the last committed one, the target checks them in one forward, the
longest matching prefix is kept together with the target's own next token. The text is the target's greedy text.

Legend: K block size, E = taps * D, V vocabulary.
Source: DFlash paper section 4.3; z-lab dflash 0.1.0, ``dflash_generate``.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_model.attention import Mask
from dflash_model.cache import DraftCache
from dflash_model.config import SLIDING
from dflash_model.drafter import Drafter, DraftInputs
from dflash_model.mask import dense_mask
from dflash_model.rollback import RewindableCache
from dflash_model.taps import HiddenTaps, decoder_layers


@dataclass
class Generation:
    """What one call produced.

    Attributes:
        token_ids: new tokens, without the prompt, the stop token included.
        committed: tokens each round added (accepted proposals and the target's own), cut at the stop token.
        prefill_seconds: wall time until the first token.
        decode_seconds: wall time after it.
    """

    token_ids: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per target forward after the prefill; 1.0 when nothing was ever accepted."""
        return sum(self.committed) / len(self.committed) if self.committed else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding rate, prefill and first token left out."""
        return sum(self.committed) / self.decode_seconds if self.decode_seconds else 0.0


@torch.inference_mode()
def generate(
    drafter: Drafter | None,
    target: PreTrainedModel,
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Greedy text of ``target`` after ``input_ids``, drafted by ``drafter``, or by nobody when it is None.

    In fp32 both give the same tokens. In bf16 a block of K tokens and single steps can differ in the target's own
    argmax, so texts may part.

    Args:
        drafter: on the target's device; None decodes one token a forward with the same loop.
        target: a causal language model of transformers.
        input_ids: the prompt's tokens, at least one.
        max_new_tokens: limit on new tokens.
        stop_token_ids: tokens that end the text; the one met is kept.
        on_tokens: called with each group of new tokens as they are committed.
    """
    session = _Session(drafter, target)
    result = Generation()
    began = time.perf_counter()
    first = session.prefill(torch.tensor([list(input_ids)], device=target.device))
    result.prefill_seconds = time.perf_counter() - began
    new = [first]
    began = time.perf_counter()
    while True:
        stop = next((i + 1 for i, token in enumerate(new) if token in stop_token_ids), None)
        new = new[: min(stop or len(new), max_new_tokens - len(result.token_ids))]
        if result.token_ids:
            result.committed.append(len(new))
        result.token_ids += new
        if on_tokens is not None:
            on_tokens(new)
        if stop is not None or len(result.token_ids) >= max_new_tokens:
            break
        new = session.round(result.token_ids[-1])
    result.decode_seconds = time.perf_counter() - began
    return result


class _Session:
    """The caches of one sequence and the two forwards of a round."""

    def __init__(self, drafter: Drafter | None, target: PreTrainedModel) -> None:
        self.drafter, self.target = drafter, target
        self.embed = target.get_input_embeddings()
        head = target.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self.head = head
        self.target_cache = RewindableCache(target)
        self.draft_cache = DraftCache()
        self.context_BSE: Tensor | None = None

    def prefill(self, prompt_BS: Tensor) -> int:
        logits_BSV = self._forward(prompt_BS, logits_to_keep=1)
        return int(logits_BSV[0, -1].argmax())

    def round(self, last_token: int) -> list[int]:
        """Propose, verify, roll back; return the committed tokens."""
        anchor = torch.tensor([[last_token]], device=self.target.device)
        block_BK = (
            anchor if self.drafter is None else torch.cat((anchor, self._propose(self.drafter, last_token)), dim=1)
        )
        self.target_cache.mark()
        choice_K = self._forward(block_BK)[0].argmax(-1)
        matches = (block_BK[0, 1:] == choice_K[:-1]).cumprod(0)
        proposals_and_choice = torch.cat((block_BK[0, 1:], choice_K, matches.sum()[None])).tolist()  # one device sync
        size = block_BK.shape[1]
        accepted = proposals_and_choice[-1]
        replay = self.target_cache.reject(size, accepted + 1)
        if self.context_BSE is not None:
            self.context_BSE = self.context_BSE[:, : accepted + 1]
        if replay:
            kept = self.context_BSE
            self._forward(block_BK[:, :replay], logits_to_keep=1)
            self.context_BSE = kept
        return [*proposals_and_choice[:accepted], proposals_and_choice[size - 1 + accepted]]

    def _forward(self, ids_BS: Tensor, logits_to_keep: int = 0) -> Tensor:
        caching = {self.target_cache.argument: self.target_cache.cache, "use_cache": True}
        if self.drafter is None:
            return self.target(input_ids=ids_BS, logits_to_keep=logits_to_keep, **caching).logits
        with HiddenTaps(decoder_layers(self.target), self.drafter.config.target_layer_ids) as taps:
            logits_BSV = self.target(input_ids=ids_BS, logits_to_keep=logits_to_keep, **caching).logits
            self.context_BSE = taps.take()
        return logits_BSV

    def _propose(self, drafter: Drafter, last_token: int) -> Tensor:
        """Argmax of slots 1..K-1 after the last committed token, ``[1, K - 1]``."""
        config, device = drafter.config, self.target.device
        assert self.context_BSE is not None
        seen = self.draft_cache.length
        start = seen + self.context_BSE.shape[1]  # the anchor's position: it has no context features yet
        block_BK = torch.full((1, config.block_size), config.mask_token_id, device=device)
        block_BK[0, 0] = last_token
        masks: dict[str, Mask] = {}
        for layer_type in set(config.layer_types):
            causal, window = config.causal_in_block(layer_type), config.window(layer_type)
            if causal or window is not None or layer_type == SLIDING:
                edge = torch.tensor([[start]], device=device)
                masks[layer_type] = dense_mask(
                    torch.zeros_like(edge), edge, start, config.block_size, window=window, causal=causal
                )
        dtype = drafter.fc.weight.dtype
        hidden_BKD = drafter(
            DraftInputs(
                embedding_BQD=self.embed(block_BK).to(dtype),
                context_BSE=self.context_BSE.to(dtype),
                context_position_BS=torch.arange(seen, start, device=device)[None],
                block_position_BQ=torch.arange(start, start + config.block_size, device=device)[None],
                masks=masks,
            ),
            self.draft_cache,
        )
        return self.head(hidden_BKD[:, 1:].to(self.head.weight.dtype)).argmax(-1)
