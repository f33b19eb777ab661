"""The target's context features: right layers, documents kept apart, sharded equal to whole."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from dflash_data.ends import FrozenEnds
from dflash_data.packs import TokenPack
from dflash_data.schedule import Stream, WorkItem
from dflash_data.target import ShardedTarget, find_target
from dflash_model.taps import text_config
from support.ranks import run_ranks
from support.tiny import tiny_target

TAPS = (0, 2, 4)
FAMILIES = ["qwen3", "llama", "qwen3_5"]


def token_pack(lengths: list[int], seed: int = 0) -> TokenPack:
    """Documents of the given lengths; the last one plays the padded tail."""
    rng = np.random.default_rng(seed)
    doc = np.repeat([*range(len(lengths) - 1), -1], lengths).astype(np.int32)
    position = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    ids = rng.integers(0, 130, len(doc)).astype(np.int32)
    empty = torch.zeros(0)
    tensors = [torch.from_numpy(array) for array in (ids, position, doc)]
    return TokenPack(WorkItem(0, Stream.TRAIN, 0), *tensors, empty, empty, empty, empty, empty)


def documents_alone(family: str, pack: TokenPack) -> torch.Tensor:
    """Each document run by itself through the plain model, layer outputs from ``output_hidden_states``."""
    model = tiny_target(family)
    parts = []
    for ids in pack.input_ids_S.long().split(pack.document_lengths()):
        with torch.no_grad():
            states = model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
        parts.append(torch.cat([states[index + 1][0] for index in TAPS], dim=-1))
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_packed_and_sharded_equals_documents_alone(family: str, ranks: int, tmp_path: Path) -> None:
    """On three ranks the shards are uneven and every rank has its own documents."""
    tiny_target(family).save_pretrained(tmp_path / "target")
    lengths = [[5, 19, 1, 7], [30, 2], [11, 21]]

    def work(rank: int) -> float:
        mesh = DeviceMesh("cpu", list(range(ranks)))
        target = ShardedTarget(
            find_target(str(tmp_path / "target"), None), TAPS, mesh=mesh, dtype=torch.float32, reshard=True
        )
        worst = 0.0
        for seed in range(2):  # twice: nothing may stay behind from the first forward
            pack = token_pack(lengths[rank], seed)
            worst = max(worst, float((target(pack) - documents_alone(family, pack)).abs().max()))
        return worst

    assert max(run_ranks(work, ranks, tmp_path)) < 2e-5


def test_packing_really_needs_the_split(tmp_path: Path) -> None:
    """The hybrid's recurrent layers do leak when the row is run as one document: the test above has power."""
    tiny_target("qwen3_5").save_pretrained(tmp_path / "target")
    pack = token_pack([12, 20])

    def work(rank: int) -> float:
        target = ShardedTarget(
            find_target(str(tmp_path / "target"), None),
            TAPS,
            mesh=DeviceMesh("cpu", [0]),
            dtype=torch.float32,
            reshard=True,
        )
        pack.document_lengths = lambda: [32]  # type: ignore[method-assign]
        leaked = target(pack)
        del pack.document_lengths  # type: ignore[method-assign]
        return float((leaked - target(pack)).abs().max())

    assert run_ranks(work, 1, tmp_path)[0] > 1e-3  # fifty times the tolerance above


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_ends_are_the_models_own(tied: bool, tmp_path: Path) -> None:
    model = tiny_target("qwen3")
    model.config.tie_word_embeddings = tied
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "target")
    ends = FrozenEnds.load(find_target(str(tmp_path / "target"), None), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(ends.head_VD, model.lm_head.weight)
    assert torch.equal(ends.embedding_VD, model.model.embed_tokens.weight)


def test_multimodal_checkpoint_keys(tmp_path: Path) -> None:
    """A checkpoint whose language model sits under ``model.language_model.`` loads the same."""
    from safetensors.torch import load_file, save_file

    tiny_target("qwen3").save_pretrained(tmp_path / "target")
    path = tmp_path / "target" / "model.safetensors"
    plain = FrozenEnds.load(find_target(str(path.parent), None), dtype=torch.float32, device=torch.device("cpu"))
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})
    again = FrozenEnds.load(find_target(str(path.parent), None), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(plain.head_VD, again.head_VD)
    assert text_config(tiny_target("qwen3").config).vocab_size == 131
