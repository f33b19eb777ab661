"""Attention over a row of packed documents that do not see each other.

transformers keeps them apart by a mask over the whole row: S² scores, of which a row of short documents needs few. Here
each document attends by itself, all of them in one call of flash attention on a GPU. Measured on an H200 with 8,192
tokens: under a mask, the 15 attention layers of Qwen3.6-27B take 100 of a forward's 913 ms, those of SmolLM2-135M 19 of
the 54 ms of a whole training step.

Legend: S tokens of the row, H heads, D head size, N documents.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from dflash_data.packs import staged

NAME = "packed_documents"  # transformers takes any name with "flash" in it for one of its own
FLASH_HEAD_SIZE = 256  # the largest that flash attention takes
HALF = {torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class PackedRow:
    """Where the documents of a row lie.

    Attributes:
        starts_S: int32 on the device: where each document begins, then S to the end. Its size does not tell how many
            documents there are, so one compiled graph serves all rows.
        sizes_2: int64 on the host: documents, and tokens of the longest.
        starts_N: ``starts_S`` up to its first S.
        host_starts_N: the same on the host.
        lengths: of the documents.
    """

    starts_S: Tensor
    sizes_2: Tensor
    starts_N: Tensor
    host_starts_N: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "PackedRow":
        """The row of these documents."""
        total, count = sum(lengths), len(lengths)
        starts_S = torch.full((total + 1,), total, dtype=torch.int32)
        starts_S[: count + 1] = torch.tensor([0, *lengths]).cumsum(0)
        there_S, sizes_2 = staged(starts_S, device), torch.tensor([count, max(lengths)])
        return cls(there_S, sizes_2, there_S[: count + 1], starts_S[: count + 1], lengths)


@torch.library.custom_op("dflash::packed_attention", mutates_args=())
def packed_attention(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, starts_S: Tensor, sizes_2: Tensor, scale: float, window: int
) -> Tensor:
    """Causal attention inside each document, ``[S, H, D]``; opaque to the compiler, as its work depends on the row.

    Args:
        query_SHD: has a multiple of the heads of keys and values.
        key_SHD: like the values.
        value_SHD: may have another head size.
        starts_S: as in ``PackedRow``.
        sizes_2: likewise.
        scale: of the scores.
        window: tokens that are seen back, itself included; 0 for all.
    """
    count, longest = sizes_2.tolist()
    if query_SHD.is_cuda and query_SHD.dtype in HALF and query_SHD.shape[-1] == value_SHD.shape[-1] <= FLASH_HEAD_SIZE:
        starts_N = starts_S[: count + 1]
        # What torch.nn.attention.varlen calls; that refuses grouped heads on torch 2.13 unless told, and on 2.11 cannot
        # be told.
        return torch.ops.aten._flash_attention_forward(
            query_SHD, key_SHD, value_SHD, starts_N, starts_N, longest, longest, 0.0, True, False,
            scale=scale, window_size_left=window - 1 if window else -1, window_size_right=0,
        )[0].contiguous()  # fmt: skip
    lengths = starts_S[: count + 1].diff().tolist()
    parts = [part.transpose(0, 1)[None] for part in (query_SHD, key_SHD, value_SHD)]
    out = [
        _one_document(*document, scale=scale, window=window)
        for document in zip(*(part.split(lengths, dim=2) for part in parts), strict=True)
    ]
    return torch.cat(out, dim=2)[0].transpose(0, 1).contiguous()


@packed_attention.register_fake
def _packed_attention_fake(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, starts_S: Tensor, sizes_2: Tensor, scale: float, window: int
) -> Tensor:
    return query_SHD.new_empty((*query_SHD.shape[:2], value_SHD.shape[-1]))


def _one_document(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
    size, mask = query.shape[2], None
    if 0 < window < size:
        back = torch.arange(size, device=query.device)
        distance = back[:, None] - back
        mask = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    packed_row: tuple[Tensor, Tensor], scaling: float | None = None, sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers' attention modules call, with ``[1, H, S, D]``."""
    assert attention_mask is None, f"{type(module).__name__} brings a mask"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    of_row = (part[0].transpose(0, 1) for part in (query, key, value))
    return packed_attention(*of_row, *packed_row, scale, sliding_window or 0)[None], None


def use_packed_attention(decoder: PreTrainedModel) -> bool:
    """Let a decoder attend inside documents alone, if all that its attention needs is known here.

    It is where transformers lets it use flash attention, and has no cap on the scores and no sinks.
    """
    capped = getattr(decoder.config, "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith("sinks") for name, _ in decoder.named_parameters())
    if not decoder._supports_flash_attn or capped or sinks:
        return False
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # None, as no mask is given
    decoder.set_attn_implementation(NAME)
    return True
