"""Attention over [context | block] keys: flex_attention for a BlockMask, SDPA for a dense mask or none."""

import importlib.util
from contextlib import ContextDecorator
from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from dflash_model.errors import UserError

Mask = BlockMask | Tensor | None

# flash-attn-4 wants BlockMasks in the tiles of its own kernels. On compute capability 9 these are 128 x 128 for heads
# of 128, as in mask.py; for other heads and on later GPUs they are not.
FLASH_HEAD, HOPPER = 128, 9
# The versions that ran; others were not tried.
FLASH_INSTALL = "pip install flash-attn-4==4.0.0b5 quack-kernels==0.3.3 'nvidia-cutlass-dsl[cu13]==4.4.2'"

# Uncompiled flex_attention materialises the scores. Inside a compiled layer this inner compile is simply inlined;
# it matters only for a layer that runs eagerly.
_compiled_flex_attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def attend(q_BNQH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor, mask: Mask, *, flash: bool = False) -> Tensor:
    """Grouped-query attention, scaled by ``H ** -0.5``.

    Args:
        q_BNQH: queries of the block slots.
        k_BMTH: keys, context first; T = S + Q.
        v_BMTH: values.
        mask: what is visible (see ``mask.py``); None when everything is.
        flash: under a BlockMask, by flash-attn-4, where ``check_flash`` allows it.

    Returns:
        ``[B, N, Q, H]``.
    """
    if isinstance(mask, BlockMask):
        options: FlexKernelOptions | None = {"BACKEND": "FLASH"} if flash else None
        out = _compiled_flex_attention(q_BNQH, k_BMTH, v_BMTH, block_mask=mask, enable_gqa=True, kernel_options=options)
        assert isinstance(out, Tensor)
        return out
    return F.scaled_dot_product_attention(q_BNQH, k_BMTH, v_BMTH, attn_mask=mask, enable_gqa=True)


def check_flash_heads(key: str, dtype: torch.dtype, head_dim: int) -> None:
    """Refuse queries, keys and values that flash-attn-4 does not take under a BlockMask on a Hopper GPU.

    Args:
        key: the setting that asks for it.
        dtype: their type.
        head_dim: H.

    Raises:
        UserError: another type or size.
    """
    if dtype != torch.bfloat16 or head_dim != FLASH_HEAD:
        raise UserError(
            f"{key} is true; flash-attn-4 takes bfloat16 and heads of {FLASH_HEAD} here, not {str(dtype)[6:]} and"
            f" {head_dim}"
        )


def check_flash(key: str, device: torch.device) -> None:
    """Refuse a device whose kernels were never tried, and the absence of flash-attn-4.

    Args:
        key: the setting that asks for it.
        device: where attention runs.

    Raises:
        UserError: not a Hopper GPU, or the package cannot be found.
    """
    if device.type != "cuda":
        raise UserError(f"{key} is true; flash-attn-4 takes Hopper GPUs, and the device is {device.type}")
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{key} is true; flash-attn-4 takes Hopper GPUs here (tried on an H200), and this is {name}")
    try:
        found = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # there is no flash_attn, or one of another version that is broken
        found = False
    if not found:
        raise UserError(f"{key} is true and flash_attn.cute cannot be imported; with torch 2.11: {FLASH_INSTALL}")


class WithoutCudnn(ContextDecorator):
    """Attention keeps off cuDNN inside, for texts that grow; where threads overlap, until the last one has left.

    On Hopper GPUs and later torch 2.11 takes cuDNN first, which makes a plan for each new length: probably why, with
    SmolLM2-135M and a drafter of five layers on an H200, a round took 99 ms, and 34 when all lengths had been met.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


without_cudnn = WithoutCudnn()  # the flag is the process's
