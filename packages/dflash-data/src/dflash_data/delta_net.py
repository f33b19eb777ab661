"""Gated delta nets over a row of packed documents that do not see each other.

Inside a packed row, transformers' gated delta net would carry its convolution and its state from one document into the
next. With flash-linear-attention on a GPU all documents go through at once, else one after the other.

Legend: S tokens of the row.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dflash_data.packed import ROW

SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Qwen3.5's projections; Qwen3-Next interleaves them


class PerDocument:
    """Runs a mixer of transformers document by document."""

    def __init__(self, mixer: Any) -> None:  # noqa: ANN401 - by duck
        self._forward = mixer.forward

    def __call__(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """Apply the mixer to each document of ``[1, S, width]``."""
        parts = hidden_states.split(ROW.get().lengths, dim=1)
        return torch.cat([self._forward(hidden_states=part, **kwargs) for part in parts], dim=1)


class AllDocuments:
    """The forward of transformers' Qwen3_5GatedDeltaNet for all documents at once.

    There the convolution is a plain one, decay and gate are kernels of their own, and queries and keys are copied for
    each value head that shares them.
    """

    def __init__(self, mixer: Any) -> None:  # noqa: ANN401 - by duck
        from fla.modules.convolution import causal_conv1d  # type: ignore[missing-import]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[missing-import]

        self._mixer, self._convolve, self._delta_rule = mixer, causal_conv1d, chunk_gated_delta_rule

    def __call__(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """Apply the mixer to each document of ``[1, S, width]``."""
        mixer, row = self._mixer, ROW.get()
        documents = {"cu_seqlens": row.starts_N, "cu_seqlens_cpu": row.host_starts_N}
        # Each from its own columns, so that all three are contiguous, which the delta rule would make them by copying.
        widths = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
        columns = mixer.in_proj_qkv(hidden_states).split(widths, dim=-1)
        query, key, value = (
            self._convolve(x, weight, activation=mixer.activation, **documents)[0]
            for x, weight in zip(columns, mixer.conv1d.weight.squeeze(1).split(widths), strict=True)
        )
        out, _ = self._delta_rule(
            query.unflatten(-1, (-1, mixer.head_k_dim)), key.unflatten(-1, (-1, mixer.head_k_dim)),
            value.unflatten(-1, (-1, mixer.head_v_dim)),
            g=mixer.in_proj_a(hidden_states), beta=mixer.in_proj_b(hidden_states), A_log=mixer.A_log,
            dt_bias=mixer.dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True, **documents,
        )  # fmt: skip
        gate = mixer.in_proj_z(hidden_states)
        normed = mixer.norm(out.reshape(-1, mixer.head_v_dim), gate.reshape(-1, mixer.head_v_dim))
        return mixer.out_proj(normed.view(*hidden_states.shape[:2], -1))


def pack_delta_net(mixer: Any, device: torch.device) -> None:  # noqa: ANN401 - by duck
    """Let a mixer keep documents apart, in the fastest way at hand."""
    known = all(name in dict(mixer.named_children()) for name in SEPARATE) and mixer.conv1d.bias is None
    fast = known and device.type == "cuda" and find_spec("fla") is not None
    mixer.forward = (AllDocuments if fast else PerDocument)(mixer)
