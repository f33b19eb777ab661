"""Targets in float8: kept and multiplied in it, and read from checkpoints that are stored in it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dflash_data.float8 import Float8Linear, quantize_rows
from dflash_data.packs import TokenPack
from dflash_data.schedule import Stream, WorkItem
from dflash_data.target import ShardedTarget, TargetModel, find_target
from dflash_data.weights import TargetFiles
from dflash_model import UserError
from support.ranks import run_ranks
from support.tiny import DENSE, tiny_target

TAPS = (0, 2, 4)


def features(target: TargetModel, ranks: int, folder: Path, *, float8: bool) -> torch.Tensor:
    """Of a row of two documents."""

    def work(rank: int) -> None:
        mesh = DeviceMesh("cpu", list(range(ranks)))
        sharded = ShardedTarget(target, TAPS, mesh=mesh, dtype=torch.float32, reshard=True, float8=float8)
        ids = torch.arange(48) * 7 % 130
        position, doc = torch.cat((torch.arange(30), torch.arange(18))), torch.tensor([0] * 30 + [1] * 18)
        found = sharded(TokenPack(WorkItem(0, Stream.TRAIN, 0), ids, position, doc, *[torch.zeros(0)] * 5))
        torch.save(found, folder / f"{rank}.pt")

    run_ranks(work, ranks, folder)
    return torch.load(folder / "0.pt", weights_only=True)


def test_a_linear_multiplies_what_it_holds() -> None:
    """Against fp64 with the float8 factors; a row of zeros and one of large numbers do not disturb the others."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=True)
    x = torch.randn(3, 5, 64)
    x[0, 0] = 0
    x[1, 2] *= 1e4
    held = Float8Linear(linear)
    weight, scale = quantize_rows(linear.weight.detach())
    held.weight.data, held.scale.data = weight, scale
    assert ((weight.float() * scale - linear.weight).abs() <= linear.weight.abs() / 16 + scale * 2**-10).all()
    x8, x_scale = quantize_rows(x.view(15, 64))
    expected = (x8.double() * x_scale) @ (weight.double() * scale).T + linear.bias.double()
    found = held(x).view(15, 48).double()
    size = expected.abs().amax(-1, keepdim=True)
    assert ((found - expected).abs() / size).max() < 1e-5
    assert torch.equal(found[0], linear.bias.double())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma4"])
def test_sharded_float8_is_float8_on_one_rank(family: str, tmp_path: Path) -> None:
    """Rows are quantized by the rank that keeps them; hidden states are off by float8's rounding and no more."""
    if family == "qwen3":  # the tiny one has no matrix large enough
        target = find_target(None, {"model_type": family, **DENSE, "hidden_size": 128, "intermediate_size": 192})
    else:
        tiny_target(family).save_pretrained(tmp_path / "target")
        target = find_target(str(tmp_path / "target"), None)
    one, three = (features(target, ranks, tmp_path, float8=True) for ranks in (1, 3))
    exact = features(target, 1, tmp_path, float8=False)
    torch.testing.assert_close(three, one, rtol=1e-4, atol=1e-4)
    error = float((one - exact).norm() / exact.norm())
    assert 1e-3 < error < 0.1


def block_quantized(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float8 values, a scale for each 128 x 128 block, and what both are worth, block by block."""
    blocks = [-(-size // 128) for size in tensor.shape]
    stored, scales, worth = torch.empty_like(tensor, dtype=torch.float8_e4m3fn), torch.empty(blocks), tensor.clone()
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            here = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = tensor[here].abs().max() / 448
            stored[here] = (tensor[here] / scales[i, j]).to(stored.dtype)
            worth[here] = stored[here].float() * scales[i, j]
    return stored, scales, worth


def test_block_float8_checkpoints_are_read(tmp_path: Path) -> None:
    """Blocks are cut by the shards of three ranks, and by the edges of the matrices."""
    model = tiny_target("qwen3")
    model.save_pretrained(tmp_path / "plain")
    tensors, shared = load_file(tmp_path / "plain" / "model.safetensors"), {}
    (tmp_path / "float8").mkdir()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored, scales, tensors[name] = block_quantized(tensors[name])
        shared |= {name: stored, f"{name}_scale_inv": scales}
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    save_file(tensors | shared, tmp_path / "float8" / "model.safetensors")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (tmp_path / "float8" / "config.json").write_text(json.dumps(config))

    stored, plain = (find_target(str(tmp_path / name), None) for name in ("float8", "plain"))
    for ranks in (1, 3):
        found, expected = (features(target, ranks, tmp_path, float8=False) for target in (stored, plain))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "awq", "bits": 4}, "it is quantized with awq"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"fp8 with weight_block_size \[64, 64\]"),
        ({"quant_method": "compressed-tensors"}, "it is quantized with compressed-tensors"),
    ],
)
def test_other_quantizations_are_refused_by_name(
    quantization: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    tiny_target("qwen3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=complaint):
        find_target(str(tmp_path), None)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    stored, _, _ = block_quantized(torch.randn(200, 130))
    for scales in (torch.ones(2, 1), torch.ones(200, 1)):
        save_file(
            {"model.embed_tokens.weight": torch.ones(1), "model.a.weight": stored, "model.a.weight_scale_inv": scales},
            tmp_path / "model.safetensors",
        )
        with pytest.raises(UserError, match="one scale for 128 x 128 elements"):
            TargetFiles.find(tmp_path).read_into({"model.a.weight": torch.empty(200, 130)})
