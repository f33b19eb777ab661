"""On a GPU: the fast ways through a row of documents equal each document by itself."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from dflash_data.delta_net import AllDocuments, pack_delta_net
from dflash_data.packed import ROW, PackedRow, packed_attention
from dflash_model.taps import decoder_layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [300, 1, 64, 127, 532]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_flash_equals_documents_one_by_one(head_size: int, window: int) -> None:
    """bf16 against fp64, grouped heads; fp64 goes document by document."""
    ROW.set(PackedRow.of(LENGTHS, torch.device("cuda")))
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, head_size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (8, 2, 2)
    )
    found = packed_attention(query, key, value, 0.1, window)
    wide = (part.double() for part in (query, key, value))
    exact = packed_attention(*wide, 0.1, window)
    assert (found.double() - exact).norm() / exact.norm() < 4e-3


@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("value_heads", [4, 12])
def test_fused_delta_net_equals_transformers(value_heads: int) -> None:
    """All documents in one call, in bf16, against transformers' own forward in fp32 on each alone."""
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=value_heads,
        linear_key_head_dim=128, linear_value_head_dim=128, full_attention_interval=2,
    )  # fmt: skip
    torch.manual_seed(0)
    mixer = decoder_layers(AutoModelForCausalLM.from_config(config))[0].linear_attn.cuda().requires_grad_(False)
    with torch.no_grad():  # drawn weights hardly mix tokens
        mixer.dt_bias.normal_()
        mixer.A_log.uniform_(-2, 1)
        mixer.conv1d.weight.normal_()
    hidden = torch.randn(1, sum(LENGTHS), 256, device="cuda").bfloat16()
    mixer.bfloat16().float()  # the same weights for both
    alone = torch.cat([mixer(hidden_states=part.float()) for part in hidden.split(LENGTHS, dim=1)], dim=1)
    pack_delta_net(mixer.bfloat16(), torch.device("cuda"))
    assert isinstance(mixer.forward, AllDocuments)
    ROW.set(PackedRow.of(LENGTHS, torch.device("cuda")))
    found = mixer.forward(hidden_states=hidden).float()
    assert (found - alone).norm() / alone.norm() < 2e-2
    starts = ROW.get().host_starts_N[:-1].long()
    assert (found - alone)[:, starts].norm() / alone[:, starts].norm() < 2e-2  # nothing of the document before
