"""Attention over a row of packed documents that do not see each other.

transformers keeps them apart by a mask over the whole row: S² scores, of which a row of short documents needs few. Here
each document attends by itself, all of them in one call of flash attention on a GPU. Measured on an H200 with 8,192
tokens: under a mask, the 15 attention layers of Qwen3.6-27B take 100 of a forward's 913 ms, those of SmolLM2-135M 19 of
the 54 ms of a whole training step.

What transformers would put into a layer's mask decides about its window, not what it passes to attention beside it:
families differ in that. A probing forward finds it out, or that a mask has something else in it.

Legend: S tokens of the row, H heads, D head size, N documents.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from dflash_data.packs import staged

# transformers takes any name with "flash" in it for one of its own.
PACKED, PROBING = "packed_documents", "probing_documents"
FLASH_HEAD_SIZE = 256  # the largest that flash attention takes
HALF = {torch.float16, torch.bfloat16}
UNKNOWN = ("softcap", "s_aux", "position_bias")  # what attention may be asked for and is not done here


class NotPackedError(Exception):
    """This decoder's attention cannot be done document by document."""


@dataclass(frozen=True)
class PackedRow:
    """Where the documents of a row lie.

    Attributes:
        starts_N: int32 on the device, where each document begins, and S.
        host_starts_N: the same on the host.
        lengths: of the documents.
        windows: while probing, of each mask by the address of its memory, and the mask.
    """

    starts_N: Tensor
    host_starts_N: Tensor
    lengths: list[int]
    windows: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "PackedRow":
        """The row of these documents."""
        starts_N = torch.tensor([0, *lengths]).cumsum(0).int()
        return cls(staged(starts_N, device), starts_N, lengths)


ROW: ContextVar[PackedRow] = ContextVar("ROW")  # of the forward that is under way


@torch.library.custom_op("dflash::packed_attention", mutates_args=())
def packed_attention(query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention inside each document of ``ROW``, ``[S, H, D]``.

    The compiler does not look into it, and the row is none of its arguments: one compiled graph serves all rows.

    Args:
        query_SHD: has a multiple of the heads of keys and values.
        key_SHD: like the values.
        value_SHD: may have another head size.
        scale: of the scores.
        window: tokens that are seen back, itself included; 0 for all.
    """
    row = ROW.get()
    if query_SHD.is_cuda and query_SHD.dtype in HALF and query_SHD.shape[-1] == value_SHD.shape[-1] <= FLASH_HEAD_SIZE:
        longest = max(row.lengths)
        # What torch.nn.attention.varlen calls; that refuses grouped heads on torch 2.13 unless told, and on 2.11 cannot
        # be told.
        return torch.ops.aten._flash_attention_forward(
            query_SHD, key_SHD, value_SHD, row.starts_N, row.starts_N, longest, longest, 0.0, True, False,
            scale=scale, window_size_left=window - 1 if window else -1, window_size_right=0,
        )[0].contiguous()  # fmt: skip
    parts = [part.transpose(0, 1)[None] for part in (query_SHD, key_SHD, value_SHD)]
    out = [
        _one_document(*document, scale=scale, window=window)
        for document in zip(*(part.split(row.lengths, dim=2) for part in parts), strict=True)
    ]
    return torch.cat(out, dim=2)[0].transpose(0, 1).contiguous()


@packed_attention.register_fake
def _packed_attention_fake(query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, scale: float, window: int) -> Tensor:
    return query_SHD.new_empty((*query_SHD.shape[:2], value_SHD.shape[-1]))


def _one_document(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
    mask = _rule(query.shape[2], window, query.device) if 0 < window < query.shape[2] else None
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _rule(size: int, window: int, device: torch.device) -> Tensor:
    """What each token sees of a document, ``[size, size]``."""
    place = torch.arange(size, device=device)
    back = place[:, None] - place
    return (back >= 0) & (back < (window or size))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None,  # noqa: ANN401 - by duck
    *, scaling: float | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers' attention modules call, with ``[1, H, S, D]``."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    of_row = (part[0].transpose(0, 1) for part in (query, key, value))
    return packed_attention(*of_row, scale, module.packed_window)[None], None


def _probing_attention(
    module: Any,  # noqa: ANN401 - by duck
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """The same, and the module's window is found out by the mask that it was given."""
    asked = [name for name in UNKNOWN if kwargs.get(name) is not None]
    address = attention_mask.untyped_storage().data_ptr() if attention_mask is not None else 0
    found = ROW.get().windows.get(address)
    if asked or found is None:
        raise NotPackedError(f"{type(module).__name__} asks for {asked or 'a mask of its own'}")
    module.packed_window = found[0]
    return _attention(module, query, key, value, None, **kwargs)


def _probing_mask(*, mask_function: Any, local_size: int | None = None, **kwargs: object) -> Tensor:  # noqa: ANN401
    """A mask that tells its window, after a look at what transformers would have put in."""
    row, window = ROW.get(), local_size or 0
    device, total = row.starts_N.device, sum(row.lengths)
    doc_S = torch.arange(len(row.lengths)).repeat_interleave(torch.tensor(row.lengths)).to(device)
    rule, same = _rule(total, window, device), doc_S[:, None] == doc_S
    nothing, place_S = torch.zeros(1, 1, dtype=torch.long, device=device), torch.arange(total, device=device)
    theirs = torch.as_tensor(mask_function(nothing, nothing, place_S[:, None], place_S), device=device)
    if ((theirs != rule) & same).any():
        raise NotPackedError("there is more in its mask than causality and a window")
    mask = (rule & same)[None, None]
    row.windows[mask.untyped_storage().data_ptr()] = window, mask
    return mask


def use_packed_attention(decoder: PreTrainedModel, forward: Callable[[], object]) -> bool:
    """Let a decoder attend inside documents alone, where that can be had; else it stays as it is.

    Args:
        decoder: its attention modules get to know their windows.
        forward: runs it on a short row of documents, for probing.
    """
    chunked = getattr(decoder.config, "attention_chunk_size", None) is not None
    if chunked or not decoder._supports_flash_attn or not decoder._can_set_attn_implementation():
        return False
    for name, attention, mask in ((PROBING, _probing_attention, _probing_mask), (PACKED, _attention, _no_mask)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)
    masked = decoder.config._attn_implementation or "sdpa"
    decoder.set_attn_implementation(PROBING)
    try:
        forward()
    except NotPackedError:
        decoder.set_attn_implementation(masked)
        return False
    decoder.set_attn_implementation(PACKED)
    return True


def _no_mask(**kwargs: object) -> None:
    return None
