"""The target's tokenizer and chat template."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_data.conversation import Message
from dflash_model.errors import UserError


def load_tokenizer(source: str | Path, options: Mapping[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer by folder or hub name; code that lies beside it is not run.

    Args:
        source: where it is.
        options: for its chat template.

    Raises:
        UserError: there is none, or its template does not know an option.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer at {source}: {str(error).splitlines()[0]}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    template = tokenizer.get_chat_template() if options and tokenizer.chat_template else ""
    for name in options or {}:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(f"target.template_options has {name}; the chat template at {source} has no such word in it")
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, generation_prompt: bool, **options: object
) -> list[int]:
    """Tokens of a conversation by the chat template."""
    apply = cast(Callable[..., list[int]], tokenizer.apply_chat_template)
    return apply(messages, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False, **options)
