"""Speculative decoding with a DFlash drafter, in plain PyTorch.

One round: the drafter proposes K - 1 tokens after the last committed one, the target checks them in one forward, the
accepted prefix is kept together with one token of the target's own. Greedy text is the target's greedy text; sampled
text has the target's distribution.

Legend: K block size, E = taps * D, V vocabulary.
Source: DFlash paper section 4.3; z-lab dflash 0.1.0, ``dflash_generate``. Two differences, both as the servers do it:
the last block of a text is drafted whole (z-lab shortens it, which changes bidirectional proposals), and on hybrid
targets states are restored and replayed (z-lab crops, which transformers does wrongly for recurrent states).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_model.attention import Mask, without_cudnn
from dflash_model.cache import DraftCache
from dflash_model.drafter import Drafter, DraftInputs, draft_candidates, draft_logits, embed_block
from dflash_model.errors import UserError
from dflash_model.mask import dense_mask
from dflash_model.rollback import RewindableCache, check_target
from dflash_model.sampling import Sampling, draw, reject
from dflash_model.stopwatch import Stopwatch
from dflash_model.taps import HiddenTaps, decoder_layers, text_config

GREEDY = Sampling()
# Blocks of tokens that a hybrid target may owe before they get a forward of their own. On a GPU they ride along with
# the next verification, where a few more tokens cost next to nothing (Qwen3.5-9B on an H200: speed-up 2.8x, not 1.4x);
# on a CPU a token more is a token's time more.
AGAIN_BLOCKS = {"cpu": 0, "cuda": 4}


@dataclass
class Generation:
    """What one call produced.

    Attributes:
        token_ids: new tokens, without the prompt; a stop token and the tokens of a stop string included.
        stopped_by: ``token``, ``string`` or ``length``.
        committed: tokens each round added (accepted proposals and the target's own), cut at the end of the text.
        accepted: how many of them were proposals of the drafter.
        target_forwards: forwards of the target, prefill and replays of hybrid targets included.
        prefill_seconds: time until the first token.
        decode_seconds: time after it.
        draft_seconds: of this, in the drafter.
        verify_seconds: of this, in the target and the acceptance rule.
    """

    token_ids: list[int] = field(default_factory=list)
    stopped_by: str = "length"
    committed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    target_forwards: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per round; the first token comes from the prefill and is not counted. 1.0 without a round."""
        return sum(self.committed) / len(self.committed) if self.committed else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding rate, prefill and first token left out."""
        return sum(self.committed) / self.decode_seconds if self.decode_seconds else 0.0


@torch.inference_mode()
@without_cudnn
def generate(
    drafter: Drafter | None,
    target: PreTrainedModel,
    input_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_token_ids: Iterable[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Text of ``target`` after ``input_ids``, drafted by ``drafter``, or by nobody when it is None.

    Greedy, in fp32, both give the same tokens. In bf16 a block of K tokens and single steps can differ in the target's
    own argmax, so texts may part where two tokens are nearly equal (``compare.py`` finds where).

    Args:
        drafter: on the target's device; None decodes one token a forward with the same loop.
        target: a causal language model of transformers, also inside a multimodal wrapper. Its forward is hooked while a
            call runs, so two threads cannot share one.
        input_ids: the prompt's tokens, at least one: a list, or a tensor of one sequence.
        max_new_tokens: limit on new tokens.
        sampling: greedy unless it has a temperature.
        stop_token_ids: tokens that end the text; the one met is kept.
        stop_strings: the text ends with the token that completes one of them; needs ``tokenizer``.
        tokenizer: the target's own, to look for stop strings.
        on_tokens: called with each group of new tokens as they are committed.

    Raises:
        UserError: the drafter was made for another target, the target's blocks do not equal its single steps, or an
            argument is out of range.
    """
    prompt = _as_tokens(input_ids)
    if not prompt or max_new_tokens < 1:
        raise UserError(f"got {len(prompt)} prompt tokens and max_new_tokens {max_new_tokens}; both must be 1 or more")
    if not isinstance(sampling, Sampling):
        raise UserError(f"sampling is {sampling!r}; it takes dflash_model.Sampling(temperature=…)")
    if drafter is not None:
        drafter.config.check_fits(text_config(target.config), "the drafter", "the target")
        check_target(target, len(prompt) + max_new_tokens + drafter.config.block_size)
    ends = _TextEnd({int(token) for token in stop_token_ids}, stop_strings, tokenizer)
    session = _Session(drafter, target, sampling)
    result = Generation()
    new = [session.prefill(torch.tensor([prompt], device=target.device))]
    result.prefill_seconds = session.watch.seconds("prefill")
    while True:
        accepted = len(new) - 1
        new = new[: max_new_tokens - len(result.token_ids)]
        kept, stopped_by = ends.find(result.token_ids, new)
        new = new[:kept]
        if result.token_ids:
            result.committed.append(len(new))
            result.accepted.append(min(accepted, len(new)))
        result.token_ids += new
        if on_tokens is not None:
            on_tokens(new)
        if stopped_by is not None or len(result.token_ids) == max_new_tokens:
            break
        new = session.round(result.token_ids[-1])
    result.stopped_by = stopped_by or "length"
    result.target_forwards = session.target_forwards
    result.draft_seconds, result.verify_seconds = session.watch.seconds("draft"), session.watch.seconds("verify")
    result.decode_seconds = session.watch.since("prefill")
    return result


def _as_tokens(input_ids: Sequence[int] | Tensor) -> list[int]:
    """One sequence of tokens.

    Raises:
        UserError: it is something else, such as a batch or text.
    """
    found = input_ids.squeeze(0).tolist() if isinstance(input_ids, Tensor) else list(input_ids)
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
        raise UserError(f"input_ids is a {type(input_ids).__name__}; it must be the token ids of one sequence")
    return found


@dataclass(frozen=True)
class _TextEnd:
    """Where a text stops."""

    token_ids: set[int]
    strings: Sequence[str]
    tokenizer: PreTrainedTokenizerBase | None

    def __post_init__(self) -> None:
        if isinstance(self.strings, str) or (self.strings and (self.tokenizer is None or not all(self.strings))):
            raise UserError(
                f"stop_strings is {self.strings!r}; it takes a list of texts that are not empty, and needs tokenizer"
            )

    def find(self, before: list[int], new: list[int]) -> tuple[int, str | None]:
        """How many of the new tokens belong to the text, and what stopped it."""
        for count, token in enumerate(new, start=1):
            if token in self.token_ids:
                return count, "token"
            if self.strings and self._completes(before + new[:count]):
                return count, "string"
        return len(new), None

    def _completes(self, tokens: list[int]) -> bool:
        # A token is at least one byte of text, so a string cannot reach further back; four more, because tokenizers
        # may drop a leading space. A window that begins inside a character can spoil all of it (byte-fallback
        # tokenizers then decode the whole run of bytes as unknown): one of four neighbours does not.
        window = max(len(string.encode()) for string in self.strings) + 4
        assert self.tokenizer is not None
        texts = [str(self.tokenizer.decode(tokens[-window - shift :])) for shift in range(4)]
        return any(string in text for string in self.strings for text in texts)


class _Session:
    """The caches of one sequence and the two forwards of a round."""

    def __init__(self, drafter: Drafter | None, target: PreTrainedModel, sampling: Sampling) -> None:
        self.drafter, self.target, self.sampling = drafter, target, sampling
        self.generator = sampling.generator(target.device)
        embed, head = target.get_input_embeddings(), target.get_output_embeddings()
        if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
            raise UserError(
                f"the target is a {type(target).__name__} with {type(embed).__name__} and {type(head).__name__} at its"
                " ends; it must be a causal language model with an embedding and a linear head"
            )
        self.embedding_VD, self.head_VD = embed.weight, head.weight
        self.target_cache = RewindableCache(target)
        self.draft_cache = DraftCache()
        self.context_BSE: Tensor | None = None
        self.target_forwards = 0
        self.watch = Stopwatch(target.device)
        self.again: list[int] = []  # committed tokens that a hybrid target must run again
        blocks = AGAIN_BLOCKS.get(target.device.type, 4)
        self.again_limit = 0 if drafter is None else blocks * drafter.config.block_size

    def prefill(self, prompt_BS: Tensor) -> int:
        with self.watch.measure("prefill"):
            logits_V = self._forward(prompt_BS, last_only=True)[0, -1]
            if self.sampling.greedy:
                return int(logits_V.argmax())
            return int(draw(self.sampling.probabilities(logits_V)[None], self.generator)[0])

    def round(self, last_token: int) -> list[int]:
        """Propose, verify, roll back; return the committed tokens."""
        block_K, q = torch.tensor([last_token], device=self.target.device), None
        if self.drafter is not None:
            with self.watch.measure("draft"):
                proposal, q = self._propose(self.drafter, last_token)
                block_K = torch.cat((block_K, proposal))
        with self.watch.measure("verify"):
            return self._verify(block_K, q)

    def _verify(self, block_K: Tensor, q: Tensor | None) -> list[int]:
        if len(self.again) > self.again_limit:
            self._run(self.again, last_only=True)
            self.again = []
        if len(block_K) > 1:
            self.target_cache.mark()
        num_again = len(self.again)
        ids = torch.cat((torch.tensor(self.again, dtype=torch.long, device=block_K.device), block_K))
        logits_KV = self._forward(ids[None])[0, num_again:]
        if self.sampling.greedy:
            choice_K = logits_KV.argmax(-1)
            accepted = (block_K[1:] == choice_K[:-1]).long().cumprod(0).sum()
            following = choice_K.index_select(0, accepted[None])[0]
        else:
            p = self.sampling.probabilities(logits_KV)
            accepted, following = reject(block_K[1:], p[:0] if q is None else q, p, self.generator)
        *block, count, bonus = torch.cat((block_K, accepted[None], following[None])).tolist()  # the one device sync
        if self.context_BSE is not None:
            self.context_BSE = self.context_BSE[:, num_again : num_again + count + 1]
        ran = self.again + block
        self.again = ran[: self.target_cache.reject(len(ran), num_again + count + 1)]
        return [*block[1 : count + 1], bonus]

    def _run(self, tokens: list[int], *, last_only: bool) -> None:
        """Advance the target over committed tokens whose features are known."""
        kept = self.context_BSE
        self._forward(torch.tensor([tokens], device=self.target.device), last_only=last_only)
        self.context_BSE = kept

    def _forward(self, ids_BS: Tensor, *, last_only: bool = False) -> Tensor:
        self.target_forwards += 1
        arguments: dict[str, Any] = {self.target_cache.argument: self.target_cache.cache, "use_cache": True}
        arguments["return_dict"] = True
        if last_only:
            # An index, not the number 1: for a number, Gemma 4 drops all other positions from its last layers, whose
            # taps would then be short.
            arguments["logits_to_keep"] = torch.tensor([ids_BS.shape[1] - 1], device=ids_BS.device)
        if self.drafter is None:
            return self.target(input_ids=ids_BS, **arguments).logits
        with HiddenTaps(decoder_layers(self.target), self.drafter.config.target_layer_ids) as taps:
            logits_BSV = self.target(input_ids=ids_BS, **arguments).logits
            self.context_BSE = taps.take()
        return logits_BSV

    def _propose(self, drafter: Drafter, last_token: int) -> tuple[Tensor, Tensor | None]:
        """Slots 1..K-1 after the last committed token, and the distributions they were drawn from."""
        config, device = drafter.config, self.target.device
        assert self.context_BSE is not None
        seen = self.draft_cache.length
        start = seen + self.context_BSE.shape[1]  # the anchor's position: it has no context features yet
        block_K = torch.full((config.block_size,), config.mask_token_id, device=device)
        block_K[0] = last_token
        masks: dict[str, Mask] = {}
        for layer_type in set(config.layer_types):
            causal, window = config.causal_in_block(layer_type), config.window(layer_type)
            if causal or window is not None:
                edge = torch.tensor([[start]], device=device)
                masks[layer_type] = dense_mask(
                    torch.zeros_like(edge), edge, start, config.block_size, window=window, causal=causal
                )
        dtype = drafter.fc.weight.dtype
        hidden_BKD = drafter(
            DraftInputs(
                embedding_BQD=embed_block(config, block_K[None], self.embedding_VD).to(dtype),
                context_BSE=self.context_BSE.to(dtype),
                context_position_BS=torch.arange(seen, start, device=device)[None],
                block_position_BQ=torch.arange(start, start + config.block_size, device=device)[None],
                masks=masks,
            ),
            self.draft_cache,
        )
        return self._choose(drafter, hidden_BKD[0, 1:], block_K[0])

    def _choose(self, drafter: Drafter, hidden_KD: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens for drafter outputs, and the distributions over the vocabulary that they were drawn from."""
        config, selector = drafter.config, drafter.candidate_selector
        if selector is not None:
            candidate_KJ, unary_KJ = draft_candidates(config, hidden_KD, self.head_VD, selector.top_k)
            proposal, q_KJ = selector.walk(
                hidden_KD, candidate_KJ, unary_KJ, anchor, self.sampling.temperature, self.generator
            )
            if q_KJ is None:
                return proposal, None
            return proposal, q_KJ.new_zeros(len(q_KJ), len(self.head_VD)).scatter(1, candidate_KJ, q_KJ)
        if self.sampling.greedy:
            return F.linear(hidden_KD.to(self.head_VD.dtype), self.head_VD).argmax(-1), None
        q = self.sampling.probabilities(draft_logits(config, hidden_KD, self.head_VD))
        return draw(q, self.generator), q
