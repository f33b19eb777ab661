"""DFlash drafters: the model, its attention mask, loading, saving and drafting.

import dflash_model
drafter = dflash_model.load_drafter("runs/demo/checkpoints/step-300/dflash", dtype=torch.float32)
out = dflash_model.generate(drafter, target, prompt_ids, max_new_tokens=128, stop_token_ids=[eos])
"""

from dflash_model.cache import DraftCache
from dflash_model.config import DFlash2Config, DrafterConfig, default_target_layer_ids
from dflash_model.decoding import Generation, generate
from dflash_model.drafter import Drafter, DraftInputs
from dflash_model.errors import UserError
from dflash_model.hub import check_drafter, load_drafter, save_drafter
from dflash_model.sampling import Sampling

__all__ = [
    "DFlash2Config",
    "DraftCache",
    "DraftInputs",
    "Drafter",
    "DrafterConfig",
    "Generation",
    "Sampling",
    "UserError",
    "check_drafter",
    "default_target_layer_ids",
    "generate",
    "load_drafter",
    "save_drafter",
]
