"""The target's context features: right layers, documents kept apart, sharded equal to whole."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedModel,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from conftest import Hold
from dflash_data.packed import PACKED
from dflash_data.packs import TokenPack
from dflash_data.schedule import Stream, WorkItem
from dflash_data.target import ShardedTarget, TargetModel, find_target
from dflash_data.weights import TargetFiles
from dflash_model.errors import UserError
from support.ranks import run_ranks
from support.tiny import DENSE, EXPERTS, FAMILIES, SIZES, tiny_target

TAPS = (0, 2, 4)
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
    """Documents of the given lengths; the last one plays the padded tail. Ids depend on the seed and the sum alone."""
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
def documents_alone(model: PreTrainedModel, pack: TokenPack) -> Tensor:
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
    family: str, ranks: int, checkpoint: Checkpoint, tmp_path: Path, hold: Hold
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

    worst = max(run_ranks(work, ranks, tmp_path))
    hold(f"packed hidden states, {family}", "transformers, each document alone", worst, 2e-5)


ODD: dict[str, tuple[dict[str, Any], bool]] = {  # and whether attention is done document by document
    "window in the mask alone": ({"model_type": "qwen2_moe", **EXPERTS, "use_sliding_window": True, "sliding_window": 7,
                                  "max_window_layers": 2, "shared_expert_intermediate_size": 48}, True),
    "window beside the mask alone": ({"model_type": "olmoe", "num_experts": 5, "sliding_window": 7,
                                      "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 2}, True),
    "layers hand no arguments on": ({"model_type": "stablelm"}, True),
    "final norm used twice": ({"model_type": "nanochat"}, True),
    "capped scores": ({"model_type": "gemma2", "head_dim": 16, "sliding_window": 7}, False),
    "seen both ways": ({"model_type": "gemma3_text", "head_dim": 16, "use_bidirectional_attention": True}, False),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ODD)
def test_odd_families(name: str, ranks: int, tmp_path: Path) -> None:
    """What their masks say counts; attention that is not known goes by transformers' mask."""
    described, packed = ODD[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES, **described)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # drawn weights hardly mix tokens
    model.save_pretrained(tmp_path / "target")
    pack = token_pack(LENGTHS[0])
    expected = documents_alone(model, pack)

    def work(_: int) -> tuple[str | None, float]:
        target = sharded_target(tmp_path / "target", ranks)
        return target.decoder.config._attn_implementation, float((target(pack) - expected).abs().max())

    for implementation, worst in run_ranks(work, ranks, tmp_path):
        assert (implementation == PACKED) == packed
        assert worst < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "qwen3_moe", "qwen3_5"])
def test_compiled_layers(family: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as a whole and run by the eager backend, on two ranks; rows of one document and of several."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    folder = checkpoint(family)
    packs = [token_pack(LENGTHS[0]), token_pack([sum(LENGTHS[0])]), token_pack(LENGTHS[0], 1)]
    expected = [documents_alone(plain_model(folder), pack) for pack in packs]

    def work(rank: int) -> tuple[str | None, float]:
        target = sharded_target(folder, 2)
        reason = target.compile(sum(LENGTHS[0]))
        with torch.compiler.set_stance("fail_on_recompile"):
            found = [target(pack) for pack in packs]
        return reason, max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))

    for reason, worst in run_ranks(work, 2, tmp_path):
        assert reason is None
        assert worst < 2e-5


def test_layers_that_cannot_be_traced_stay_as_they_are(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain = Qwen3MLP.forward

    def broken(self: Qwen3MLP, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return plain(self, x)

    monkeypatch.setattr(Qwen3MLP, "forward", broken)
    folder, pack = checkpoint("qwen3"), token_pack(LENGTHS[0])
    expected = documents_alone(plain_model(folder), pack)

    def work(rank: int) -> tuple[str | None, float]:
        target = sharded_target(folder, 2)
        reason = target.compile(sum(LENGTHS[0]))
        return reason, float((target(pack) - expected).abs().max())

    for reason, worst in run_ranks(work, 2, tmp_path):
        assert reason is not None
        assert "graph_break" in reason
        assert worst < 2e-5


@pytest.mark.parametrize(
    ("family", "layer"), [("qwen3_5", 0), ("gemma3", 0), ("gemma3", 1)], ids=["linear", "sliding", "full"]
)
def test_packing_really_needs_the_split(family: str, layer: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Layers of every type do leak when the row is run as one document: the test above has power."""
    folder = checkpoint(family)

    def work(rank: int) -> tuple[float, float]:
        target = sharded_target(folder, 1, (layer,))
        leak = (target(token_pack([12, 20])) - target(token_pack([32]))).abs()
        return float(leak[:12].max()), float(leak[12:].max())

    first, second = run_ranks(work, 1, tmp_path)[0]
    assert first < 2e-5
    assert second > 1e-3  # fifty times the tolerance above


REFUSED = {
    "packed in one row see each other": GptOssConfig(**DENSE, num_local_experts=5, num_experts_per_tok=2),
    # Attention over the whole row does not mind the documents' order, but does their content.
    "in one row see each other, or where": LlamaConfig(**SIZES, is_causal=False),
    "conv layers, which cannot keep packed documents apart": Lfm2Config(
        **SIZES, intermediate_size=96, layer_types=["conv", "full_attention"] * 3
    ),
}


@pytest.mark.parametrize(("complaint", "config"), REFUSED.items(), ids=["gpt-oss", "both ways", "lfm2"])
def test_targets_that_leak_are_refused(complaint: str, config: PretrainedConfig, tmp_path: Path) -> None:
    """The mask that gpt-oss gets from transformers ignores positions; nobody splits LFM2's convolutions."""
    target = TargetModel(config, None, "described")

    def work(rank: int) -> str:
        with pytest.raises(UserError) as error:
            ShardedTarget(target, TAPS, mesh=DeviceMesh("cpu", [0]), dtype=torch.float32, reshard=True)
        return str(error.value)

    found = run_ranks(work, 1, tmp_path)[0]
    assert complaint in found
    assert config.model_type in found


@pytest.mark.parametrize("joined", ["gate_up_proj", "down_proj"])
def test_ranks_read_their_own_experts_alone(joined: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Five experts on three ranks, stored one by one as published; the last rank's expert is missing."""
    stored = load_file(checkpoint("qwen3_moe") / "model.safetensors")
    experts = "model.layers.0.mlp.experts"
    del stored[f"{experts}.4.down_proj.weight"], stored[f"{experts}.4.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    whole = tiny_target("qwen3_moe").get_parameter(f"{experts}.{joined}").detach()

    def work(rank: int) -> bool | str:
        shard = distribute_tensor(torch.zeros_like(whole), DeviceMesh("cpu", [0, 1, 2]), [Shard(0)])
        try:
            TargetFiles.find(tmp_path).read_into({f"{experts}.{joined}": shard})
        except UserError as error:
            return str(error)
        return torch.equal(shard.to_local(), whole[2 * rank : 2 * rank + 2])

    first, second, error = run_ranks(work, 3, tmp_path)
    assert first is True
    assert second is True
    missing = {"gate_up_proj": "up_proj", "down_proj": "down_proj"}[joined]
    assert f"it has no tensor {experts}.4.{missing}.weight" in error


def test_the_language_model_among_other_embeddings(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Per-layer inputs are not the embedding, and an MTP module's own is not the one under the shortest prefix."""
    stored = load_file(checkpoint("gemma4") / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    spare = {f"mtp.{name}": torch.zeros(1) for name in ("embed_tokens.weight", "layers.0.mlp.weight", "lm_head.weight")}
    save_file({**spare, **renamed, "lm_head.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    files = TargetFiles.find(tmp_path)
    assert files.prefix == "model.language_model."
    assert files.head_name() == "lm_head.weight"
