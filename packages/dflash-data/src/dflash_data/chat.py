"""The target's tokenizer and chat template."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_data.conversation import Message
from dflash_model.errors import UserError


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer by folder or hub name; code that lies beside it is not run.

    Raises:
        UserError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer at {source}: {str(error).splitlines()[0]}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, generation_prompt: bool, **options: object
) -> list[int]:
    """Tokens of a conversation by the chat template."""
    apply = cast(Callable[..., list[int]], tokenizer.apply_chat_template)
    return apply(messages, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False, **options)
