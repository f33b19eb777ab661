"""A target's large matrices and its head in float8: half the bytes, and up to twice the rate on GPUs that multiply it.

Each row of a weight, and each token's activations when they come, are scaled by their own largest magnitude to float8's
range (e4m3); the product is scaled back. Rows of the weight are what ranks share, so a rank quantizes its own rows.

Legend: T tokens, I inputs, O outputs; R rows, D drafter width, V vocabulary.
Source: torch._scaled_mm with row-wise scales, as torchao's float8 dynamic row-wise recipe uses it.
"""

import torch
from torch import Tensor, nn

from dflash_model.errors import UserError

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
NARROW = 128  # outputs; a delta net's decay and gate heads, which are cheap and sensitive, have fewer
LARGEST_E5M2 = torch.finfo(torch.float8_e5m2).max
ALIGNED = 16  # what the product asks of both sides of a weight


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 rows and their fp32 scales ``[T, 1]``; an all-zero row stays zero."""
    scale_T1 = x_TI.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (x_TI.float() / scale_T1).to(FLOAT8), scale_T1


_compiled_quantize_rows = torch.compile(quantize_rows, dynamic=True, fullgraph=True)


def multiply(x_TI: Tensor, weight_OI: Tensor, scale_O1: Tensor, *, fast: bool) -> Tensor:
    """``x @ weight.T`` in the type of ``x``, whose rows are quantized here; ``fast`` sums in fewer bits."""
    x8_TI, scale_T1 = (_compiled_quantize_rows if x_TI.is_cuda else quantize_rows)(x_TI)
    return torch._scaled_mm(
        x8_TI, weight_OI.t(), scale_a=scale_T1, scale_b=scale_O1.t(), out_dtype=x_TI.dtype, use_fast_accum=fast
    )


class Float8Linear(nn.Module):
    """``x @ weight.T + bias`` with both factors in float8.

    Attributes:
        weight: float8 ``[O, I]``.
        scale: fp32 ``[O, 1]``.
        bias: as the linear had it, or None.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        empty = torch.empty_like(linear.weight, dtype=FLOAT8)
        scale = torch.empty_like(linear.weight[:, :1], dtype=torch.float32)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """In and out ``[..., I]`` and ``[..., O]`` in the type of ``x``."""
        out_TO = multiply(x.reshape(-1, self.in_features), self.weight, self.scale, fast=True)
        if self.bias is not None:
            out_TO = out_TO + self.bias
        return out_TO.view(*x.shape[:-1], self.out_features)


class Float8Head:
    """The frozen head for both of its products, in float8: its rows for the logits, its columns for the way back.

    What comes back are slopes of losses, whose size is bounded: they get one scale, and e5m2, whose exponents reach
    down to 1e-9 of it, where the probabilities of a large vocabulary lie.

    Attributes:
        weight_VD: the head as it was.
    """

    def __init__(self, head_VD: Tensor, largest_slope: float = 1.0) -> None:
        """Two copies, in float8.

        Args:
            head_VD: both sizes are multiples of 16.
            largest_slope: of a loss with respect to a logit; a factor on the logits.
        """
        (vocab, width), self._largest_slope, self.weight_VD = head_VD.shape, largest_slope, head_VD
        self._rows, self._row_scale = torch.empty_like(head_VD, dtype=FLOAT8), head_VD.new_empty(vocab, 1).float()
        self._columns = head_VD.new_empty(width, vocab, dtype=FLOAT8)
        self._column_scale = head_VD.abs().amax(0)[:, None].float().clamp_min(1e-12) / LARGEST
        for part in torch.arange(vocab).split(1 << 14):  # fp32 of all of them would be twice the head
            rows = slice(int(part[0]), int(part[-1]) + 1)
            self._rows[rows], self._row_scale[rows] = quantize_rows(head_VD[rows])
            self._columns[:, rows] = (head_VD[rows].float().t() / self._column_scale).to(FLOAT8)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """``hidden @ head.T``, ``[R, V]``."""
        return multiply(hidden_RD, self._rows, self._row_scale, fast=False)

    def back(self, slope_RV: Tensor) -> Tensor:
        """``slope @ head``, ``[R, D]``; the sum over the vocabulary is kept in fp32."""
        shrink = _compiled_shrink if slope_RV.is_cuda else _shrink
        scale = self._largest_slope / LARGEST_E5M2
        scale_R1 = torch.full((len(slope_RV), 1), scale, device=slope_RV.device)
        return torch._scaled_mm(
            shrink(slope_RV, 1 / scale), self._columns.t(), scale_a=scale_R1, scale_b=self._column_scale.t(),
            out_dtype=slope_RV.dtype,
        )  # fmt: skip


def _shrink(slope_RV: Tensor, factor: float) -> Tensor:
    return (slope_RV.float() * factor).clamp(-LARGEST_E5M2, LARGEST_E5M2).to(torch.float8_e5m2)


_compiled_shrink = torch.compile(_shrink, dynamic=True, fullgraph=True)


def check_float8(key: str, device: torch.device, dtype: torch.dtype) -> None:
    """See that this device multiplies float8 with a scale for each row.

    Raises:
        UserError: it is an older GPU, or the products are not wanted in bf16, which is all that GPUs return.
    """
    if device.type != "cuda":
        return
    if dtype != torch.bfloat16:
        raise UserError(f"{key} is true and target.dtype {dtype}; on a GPU float8 products come in bfloat16")
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"{key} is true; {torch.cuda.get_device_name(device)} cannot multiply float8 (compute"
            " capability 8.9 and later can: L40S, H100, B200 …)"
        )


def use_float8(decoder: nn.Module) -> None:
    """Replace the large linears of a decoder on meta; experts that share one tensor stay as they are."""
    found = [
        (parent, name, child)
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.out_features >= NARROW
        and child.in_features % ALIGNED == child.out_features % ALIGNED == 0
    ]
    for parent, name, child in found:
        setattr(parent, name, Float8Linear(child))
