"""The target's context features: right layers, documents kept apart, sharded equal to whole."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from dflash_data.packs import TokenPack
from dflash_data.schedule import Stream, WorkItem
from dflash_data.target import ShardedTarget, find_target
from dflash_model.errors import UserError
from support.ranks import run_ranks
from support.tiny import tiny_target

TAPS = (0, 2, 4)
FAMILIES = [
    "qwen3", "llama", "qwen2", "gemma3", "gemma4", "gemma4_dense", "gemma4_moe", "qwen3_moe", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_vl",
]  # fmt: skip
LENGTHS = [[5, 19, 1, 7], [30, 2], [11, 21]]  # per rank; 19, 21 and 30 exceed Gemma's window of 12
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Folder of a family's tiny model, written by its own ``save_pretrained`` on first use."""
    root = tmp_path_factory.mktemp("targets")

    @cache
    def write(family: str) -> Path:
        tiny_target(family).save_pretrained(root / family)
        return root / family

    return write


def token_pack(lengths: list[int], seed: int = 0) -> TokenPack:
    """Documents of the given lengths; the last one plays the padded tail."""
    rng = np.random.default_rng(seed)
    doc = np.repeat([*range(len(lengths) - 1), -1], lengths).astype(np.int32)
    position = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    ids = rng.integers(0, 130, len(doc)).astype(np.int32)
    empty = torch.zeros(0)
    tensors = [torch.from_numpy(array) for array in (ids, position, doc)]
    return TokenPack(WorkItem(0, Stream.TRAIN, 0), *tensors, empty, empty, empty, empty, empty)


def plain_model(folder: Path) -> PreTrainedModel:
    """The checkpoint as its own class loads it: the whole wrapper where it is multimodal."""
    auto = AutoModelForImageTextToText if folder.name == "qwen3_5_vl" else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval()


@torch.no_grad()
def documents_alone(model: PreTrainedModel, pack: TokenPack) -> torch.Tensor:
    """Each document run by itself through the plain model, layer outputs from ``output_hidden_states``."""
    parts = []
    for ids in pack.input_ids_S.long().split(pack.document_lengths()):
        states = model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
        parts.append(torch.cat([states[index + 1][0] for index in TAPS], dim=-1))
    return torch.cat(parts)


def sharded_target(folder: Path, ranks: int, taps: tuple[int, ...] = TAPS) -> ShardedTarget:
    mesh = DeviceMesh("cpu", list(range(ranks)))
    return ShardedTarget(find_target(str(folder), None), taps, mesh=mesh, dtype=torch.float32, reshard=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_packed_and_sharded_equals_documents_alone(
    family: str, ranks: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """On three ranks the shards are uneven and every rank has its own documents."""
    folder = checkpoint(family)
    model = plain_model(folder)
    # Twice: nothing may stay behind from the first forward.
    packs = [[token_pack(LENGTHS[rank], seed) for seed in range(2)] for rank in range(ranks)]
    expected = [[documents_alone(model, pack) for pack in row] for row in packs]

    def work(rank: int) -> float:
        target = sharded_target(folder, ranks)
        pairs = zip(packs[rank], expected[rank], strict=True)
        return max(float((target(pack) - alone).abs().max()) for pack, alone in pairs)

    assert max(run_ranks(work, ranks, tmp_path)) < 2e-5
