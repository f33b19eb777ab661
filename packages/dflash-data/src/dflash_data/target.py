"""The frozen target: what it is, and its sharded forward with taps.

Legend: S tokens of the row, E = taps * target width.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from dflash_data.delta_net import AllDocuments, pack_delta_net
from dflash_data.float8 import check_float8, use_float8
from dflash_data.packed import ROW, PackedRow, use_packed_attention
from dflash_data.packs import TokenPack, staged
from dflash_data.weights import FLOAT8_BLOCK, RandomWeights, TargetFiles, TargetWeights, load_module
from dflash_model.errors import UserError
from dflash_model.taps import HiddenTaps, decoder_layers, decoder_of, text_config

ATTENTION = {"full_attention", "sliding_attention"}
DELTA_NET = "linear_attn"  # the gated delta net's name in a layer of Qwen3-Next and Qwen3.5
SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class TargetModel:
    """A target before anything is allocated.

    Attributes:
        config: transformers configuration of the language model.
        folder: where its weights and tokenizer are; None for a target of random weights described inline.
        name: last part of its hub name or path, as datasets record who generated their responses.
    """

    config: PretrainedConfig
    folder: Path | None
    name: str

    @property
    def location(self) -> Path:
        """The folder of a target that was found by its path."""
        assert self.folder is not None
        return self.folder

    def weights(self) -> TargetWeights:
        """Where its weights come from.

        Raises:
            UserError: its folder has none.
        """
        return RandomWeights() if self.folder is None else TargetFiles.find(self.folder)

    def fingerprint(self) -> str:
        """Tells two checkpoints of one name apart: configuration, file sizes, and three places of each weight file."""
        if self.folder is None:
            passing = {"transformers_version", "dtype", "torch_dtype"}  # dtype: of whoever built the model last
            described = {name: value for name, value in self.config.to_dict().items() if name not in passing}
            return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
        known = hashlib.sha256((self.location / "config.json").read_bytes())
        for path in sorted(self.location.glob("*.safetensors")):
            size = path.stat().st_size
            known.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for place in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
                    file.seek(place)
                    known.update(file.read(SAMPLE_BYTES))
        return known.hexdigest()

    def build_meta(self, dtype: torch.dtype, num_layers: int | None = None) -> PreTrainedModel:
        """The causal language model on the meta device, cut after ``num_layers`` layers.

        Raises:
            UserError: hidden states cannot be read from its decoder document by document, or it has fewer layers.
        """
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        model.eval().requires_grad_(False)
        decoder = decoder_of(model)
        self._check_layers(decoder)
        if num_layers is not None:
            layers = decoder_layers(model)
            if num_layers > len(layers):
                raise UserError(
                    f"layer {num_layers - 1} of the target is tapped; its model_type is {self.config.model_type}, whose"
                    f" decoder in transformers has layers 0 to {len(layers) - 1}: set drafter.target_layer_ids"
                )
            decoder.layers = layers[:num_layers]
        return model

    def _check_layers(self, decoder: nn.Module) -> None:
        layers = dict(decoder.named_children()).get("layers")
        if not isinstance(layers, nn.ModuleList):
            raise UserError(
                f"the target's model_type is {self.config.model_type}; in transformers its {type(decoder).__name__} has"
                " no list of layers to read hidden states from"
            )
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * len(layers)
        recurrent = {
            kind
            for layer, kind in zip(layers, kinds, strict=False)
            if kind not in ATTENTION and not (kind == "linear_attention" and DELTA_NET in dict(layer.named_children()))
        }
        if recurrent:
            raise UserError(
                f"the target's model_type is {self.config.model_type}; it has {' and '.join(sorted(recurrent))} layers,"
                f" which cannot keep packed documents apart; {', '.join(sorted(ATTENTION))} and gated delta nets can"
            )


def find_target(path: str | None, inline: dict[str, Any] | None) -> TargetModel:
    """Find a target by hub name or folder, or describe one inline.

    With both, the inline description must agree with the checkpoint's configuration.

    Raises:
        UserError: neither given, not found, not a known architecture, or the two disagree.
    """
    described = _inline_config(inline) if inline is not None else None
    if path is None:
        if described is None:
            raise UserError("target.path is missing; it takes a hub name (Qwen/Qwen3-8B) or a folder")
        return TargetModel(described, None, "inline")
    folder = _local_folder(path)
    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:  # a broken file, or an architecture that only foreign code knows
        raise UserError(f"target.path is {path}; transformers cannot read its config.json: {error}") from error
    _check_quantization(path, whole)
    config = text_config(whole)
    # A multimodal wrapper ties its head by its own entry, whatever the one of its language model says.
    config.tie_word_embeddings = bool(config.tie_word_embeddings or getattr(whole, "tie_word_embeddings", False))
    if described is not None:
        # Some keys are only read while a configuration is made (full_attention_interval); what they decide stays.
        stated, found = described.to_dict(), config.to_dict()
        for key in sorted({*(inline or {}), "layer_types"} & stated.keys()):
            if stated[key] != found.get(key):
                raise UserError(f"target.config.{key} is {stated[key]}; the config at {path} has {found.get(key)}")
    return TargetModel(config, folder, Path(path).name)


def _check_quantization(path: str, config: PretrainedConfig) -> None:
    """Weights are read as they are stored, so the way they are quantized must be known.

    Raises:
        UserError: it is another one than float8 in blocks.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return
    found = found if isinstance(found, dict) else found.to_dict()
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method != "fp8" or list(block or []) != [FLOAT8_BLOCK] * 2:
        blocks = f" with weight_block_size {block}" if block else ""
        raise UserError(
            f"target.path is {path}; it is quantized with {method}{blocks}; only floats and fp8 in blocks of"
            f" {FLOAT8_BLOCK} x {FLOAT8_BLOCK} can be read: take the checkpoint that it was made from"
        )


def _inline_config(inline: dict[str, Any]) -> PretrainedConfig:
    try:
        return text_config(AutoConfig.for_model(**inline))
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"target.config does not describe a model that transformers knows: {error}") from error


def _local_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"target.path is {path}; there is no config.json in that folder")
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"target.path is {path}; there is no such folder")
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"target.path is {path}; there is no such folder, and the hub did not provide it: no network, or no public"
            " model of that name"
        ) from error


class ShardedTarget:
    """The target up to its last tapped layer, sharded over a mesh; maps a token pack to context features.

    Every rank of the mesh must call it the same number of times: each layer gathers its weights from all of them.

    Attributes:
        device: of this rank.
        decoder: the target's layers up to the last tapped one.
    """

    def __init__(
        self,
        target: TargetModel,
        layer_ids: tuple[int, ...],
        *,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        reshard: bool,
        float8: bool = False,
    ) -> None:
        """Build and load.

        Args:
            target: what to load.
            layer_ids: layers whose outputs are the context features.
            mesh: the target ranks.
            dtype: of weights and features.
            reshard: free each layer's gathered weights after use.
            float8: keep its large matrices in float8, and multiply in it.

        Raises:
            UserError: weights are missing, packed documents would see each other, or this GPU has no float8.
        """
        self.device = torch.device(mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        model = target.build_meta(dtype, max(layer_ids) + 1)
        decoder, layers = decoder_of(model), decoder_layers(model)
        assert isinstance(decoder, PreTrainedModel)
        if float8:
            check_float8("target.float8", self.device, dtype)
            use_float8(decoder)
        if mesh.size() > 1:  # on one rank sharding would only copy weights
            for layer in layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(decoder, mesh=mesh, reshard_after_forward=reshard)
        load_module(decoder, target.weights(), self.device, dtype)
        self.decoder, self._layers = decoder, layers
        self._taps = HiddenTaps(layers, layer_ids)
        for mixer in (part for layer in layers for name, part in layer.named_children() if name == DELTA_NET):
            pack_delta_net(mixer, self.device)
        short_S = torch.arange(8)
        use_packed_attention(decoder, lambda: self._features(short_S % target.config.vocab_size, short_S % 4, [4, 4]))
        self._check_documents_apart(target.config, dtype)

    def __call__(self, pack: TokenPack) -> Tensor:
        """Context features ``[S, E]`` of one pack; documents do not see each other."""
        return self._features(pack.input_ids_S, pack.position_S, pack.document_lengths())

    @torch.no_grad()
    def _features(self, input_ids_S: Tensor, position_S: Tensor, lengths: list[int]) -> Tensor:
        """Positions restart, there is no attention mask and no cache.

        Any of these two would make transformers attend across documents.
        """
        ROW.set(PackedRow.of(lengths, self.device))
        ids = staged(input_ids_S, self.device).long()[None]
        positions = staged(position_S, self.device).long()[None]
        self.decoder(input_ids=ids, position_ids=positions, use_cache=False)
        return self._taps.take()[0]

    def compile(self, seq_len: int) -> str | None:
        """Compile the layers for rows of ``seq_len`` tokens, on the calling thread, before any row is timed.

        All of a model's layers share the graph; where attention goes by a mask, a row that is one document has none,
        hence two of them. Of a gated delta net only the gated norm is compiled, and its layer is two graphs around it:
        inside a graph the compiler makes it slower (an 8k forward of 27B sizes on an H200 with torch 2.11: 6.2 instead
        of 8.8 ktok/s). If Dynamo cannot trace another layer as a whole, all stay as they are.

        Returns:
            Why they could not be traced, if so.
        """
        eager = [layer.forward for layer in self._layers]
        for layer in self._layers:
            mixer: Any = dict(layer.named_children()).get(DELTA_NET)
            if mixer is not None:
                if isinstance(mixer.forward, AllDocuments):
                    mixer.norm.forward = torch.compile(mixer.norm.forward, dynamic=False)
                mixer.forward = torch._dynamo.disable(mixer.forward)
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=mixer is None)
        ids_S, half = torch.zeros(seq_len, dtype=torch.long), seq_len // 2
        try:
            for lengths in ([half, half], [seq_len]):
                self._features(ids_S, torch.cat([torch.arange(length) for length in lengths]), lengths)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # nothing of ours: another target's forward
            for layer, forward in zip(self._layers, eager, strict=True):
                layer.forward = forward
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return None

    def _check_documents_apart(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        """Turn the order of some documents round, change every other one, and see that the others' features stay.

        Some families of transformers build their mask without looking at positions (gpt-oss), or take a token's place
        in the row for its position (Marian). Where a leak reaches least far, it reaches a document's first
        token, and changes it by much of its norm. What rounding does stays under half the digits of the type, but for a
        token that it sends to another expert: hence four documents and the median over their first tokens.

        Raises:
            UserError: the features change, or are not one finite row for each token.
        """
        size, documents = 4, 8
        count = documents * size
        place_S, position_S = torch.arange(count), torch.arange(size).repeat(documents)
        turned_S = place_S.view(documents, size).flip(0).flatten()
        changed_S = place_S + count * (place_S // size % 2)
        rows = [
            self._features(ids_S % config.vocab_size, position_S, [size] * documents).float()
            for ids_S in (place_S, changed_S[turned_S])
        ]
        refused = f"the target's model_type is {config.model_type}; in transformers "
        if rows[0].shape[:-1] != (count,) or not torch.cat(rows).isfinite().all():
            raise UserError(refused + "its layers do not return one finite hidden state for each token")
        before, after = rows[0][:: 2 * size], rows[1][turned_S.to(self.device)][:: 2 * size]
        change = float(((after - before).norm(dim=-1) / before.norm(dim=-1)).median())
        if change > torch.finfo(dtype).eps ** 0.5:
            raise UserError(
                refused + "documents that are packed in one row see each other, or where in the row they stand (a"
                f" document's hidden states change by {change:.0%} with it), so no drafter can be trained for it"
            )
