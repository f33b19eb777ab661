r"""Chat templates that behave like those of the real families, and a tokenizer for each. All are our own.

Written from how the families behave, not from their files:

- ChatML: every turn is ``<|im_start|>role\n…<|im_end|>\n``; calls are JSON in ``<tool_call>``.
- Qwen3-like: behind the last real question a turn shows its reasoning in a think block, and the last turn shows a block
  even if it is empty; before it no reasoning is shown. ``enable_thinking=False`` prompts with an empty block.
- Qwen3.5-like: behind the last question every turn shows a block; the prompt opens it, or has an empty one.
- Llama-3-like: headers, ``<|eot_id|>``, trimmed content, one call a turn.
- Gemma-like: the system turn joins the first question, turns must alternate.
- Llama-2-like: ``[INST]``; the generation prompt adds nothing. Its tokenizer puts a blank before the first word.
- marked: ChatML with generation markers, the end token within or behind them.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LINES = [  # line breaks, blanks and full stops so often that they become joint tokens, as in real vocabularies
    *("a.\n" * 9, "a\n\n" * 9, "a\n\n\n" * 9, "a\n    b" * 9, "a  b" * 9, "a.\n\n" * 9),
    "user assistant system tool model think tool_call function parameter arguments name",
    "The quick brown fox jumps over the lazy dog.\n\nThe dog does not mind.\n\n\n    It sleeps.\n",
    "What is the capital of France?\nThe capital of France is Paris.\n\n",
    "é à ü 漢字 かな 한국어 👩‍👩‍👧‍👦 e\u0301",
]

CHATML = """
{%- if tools -%}
    {{ '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' -%}{{ messages[0].content + '\n\n' }}{%- endif -%}
    {{ 'Functions:' }}
    {%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
    {{ '<|im_end|>\n' }}
{%- endif -%}
{%- for turn in messages -%}
    {%- if not (tools and loop.first and turn.role == 'system') -%}
        {{ '<|im_start|>' + turn.role + '\n' + turn.content }}
        {%- for call in turn.tool_calls or [] -%}
            {{ ('\n' if turn.content or not loop.first else '') + '<tool_call>\n' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\n</tool_call>' }}
        {%- endfor -%}
        {{ '<|im_end|>\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

QWEN3 = """
{%- if tools -%}
    {{ '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' -%}{{ messages[0].content + '\n\n' }}{%- endif -%}
    {{ 'Functions:' }}
    {%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
    {{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}
    {{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif -%}
{%- set seen = namespace(question=messages | length - 1) -%}
{%- for turn in messages -%}
    {%- if turn.role == 'user' and not turn.content.startswith('<tool_response>') -%}
        {%- set seen.question = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for turn in messages -%}
    {%- if turn.role == 'user' or (turn.role == 'system' and not loop.first) -%}
        {{ '<|im_start|>' + turn.role + '\n' + turn.content + '<|im_end|>\n' }}
    {%- elif turn.role == 'assistant' -%}
        {%- set thought, said = turn.reasoning_content or '', turn.content -%}
        {%- if not thought and '</think>' in said -%}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
            {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {{ '<|im_start|>assistant\n' }}
        {%- if loop.index0 > seen.question and (loop.last or thought) -%}
            {{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}
        {%- else -%}
            {{ said }}
        {%- endif -%}
        {%- for call in turn.tool_calls or [] -%}
            {{ ('\n' if said or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name }}
            {{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor -%}
        {{ '<|im_end|>\n' }}
    {%- elif turn.role == 'tool' -%}
        {%- if loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
        {{ '\n<tool_response>\n' + turn.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}
"""

QWEN35 = """
{%- set seen = namespace(question=-1) -%}
{%- for turn in messages -%}
    {%- if turn.role == 'user' -%}{%- set seen.question = loop.index0 -%}{%- endif -%}
    {%- if turn.role == 'system' and not loop.first -%}
        {{ raise_exception('The system turn must be first.') }}
    {%- endif -%}
{%- endfor -%}
{%- if tools -%}
    {{ '<|im_start|>system\nFunctions:' }}
    {%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
    {%- if messages[0].role == 'system' -%}{{ '\n\n' + messages[0].content | trim }}{%- endif -%}
    {{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}
    {{ '<|im_start|>system\n' + messages[0].content | trim + '<|im_end|>\n' }}
{%- endif -%}
{%- for turn in messages -%}
    {%- set said = turn.content | trim -%}
    {%- if turn.role == 'user' -%}
        {{ '<|im_start|>user\n' + said + '<|im_end|>\n' }}
    {%- elif turn.role == 'assistant' -%}
        {%- set thought = turn.reasoning_content or '' -%}
        {%- if not thought and '</think>' in said -%}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1] -%}
            {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {{ '<|im_start|>assistant\n' }}
        {%- if loop.index0 > seen.question -%}{{ '<think>\n' + thought | trim + '\n</think>\n\n' }}{%- endif -%}
        {{ said }}
        {%- for call in turn.tool_calls or [] -%}
            {{ ('\n\n' if said and loop.first else '' if loop.first else '\n') + '<tool_call>\n<function=' }}
            {{- call.function.name + '>\n' }}
            {%- for name, value in call.function.arguments | items -%}
                {{ '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
            {%- endfor -%}
            {{ '</function>\n</tool_call>' }}
        {%- endfor -%}
        {{ '<|im_end|>\n' }}
    {%- elif turn.role == 'tool' -%}
        {%- if loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
        {{ '\n<tool_response>\n' + said + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n<think>\n' + ('' if enable_thinking | default(true) else '\n</think>\n\n') }}
{%- endif -%}
"""

LLAMA3 = """
{{- bos_token -}}
{%- macro header(role) -%}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{%- endmacro -%}
{%- if tools -%}
    {{ header('system') + 'Functions:' }}
    {%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
    {{ '<|eot_id|>' }}
{%- endif -%}
{%- for turn in messages -%}
    {%- if turn.tool_calls -%}
        {%- if turn.tool_calls | length > 1 -%}{{ raise_exception('Only one call at a time!') }}{%- endif -%}
        {%- set call = turn.tool_calls[0].function -%}
        {{ header('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
        {{- '<|eot_id|>' }}
    {%- else -%}
        {{ header('ipython' if turn.role == 'tool' else turn.role) + turn.content | trim + '<|eot_id|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ header('assistant') }}{%- endif -%}
"""

GEMMA = """
{{- bos_token -}}
{%- set lead = '' -%}
{%- if messages[0].role == 'system' -%}
    {%- set lead, messages = messages[0].content | trim + '\n\n', messages[1:] -%}
{%- endif -%}
{%- for turn in messages -%}
    {%- if turn.role != ('user', 'assistant')[loop.index0 % 2] -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn.role == 'assistant' else 'user') + '\n' }}
    {{- (lead if loop.first else '') + turn.content | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

LLAMA2 = """
{%- set lead = '' -%}
{%- if messages[0].role == 'system' -%}
    {%- set lead, messages = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n', messages[1:] -%}
{%- endif -%}
{%- for turn in messages -%}
    {%- if turn.role != ('user', 'assistant')[loop.index0 % 2] -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- elif turn.role == 'user' -%}
        {{ bos_token + '[INST] ' + (lead if loop.first else '') + turn.content | trim + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + turn.content | trim + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""

MARKED = """
{%- for turn in messages -%}
    {{ '<|im_start|>' + turn.role + '\n' }}
    {%- if turn.role == 'assistant' -%}
        {%- generation -%}{{ turn.content + '<|im_end|>' }}{%- endgeneration -%}
    {%- else -%}
        {{ turn.content + '<|im_end|>' }}
    {%- endif -%}
    {{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
MARKED_WORDS = MARKED.replace(
    "{{ turn.content + '<|im_end|>' }}{%- endgeneration -%}",
    "{{ turn.content }}{%- endgeneration -%}{{ '<|im_end|>' }}",
)
# A last turn ends with two special tokens, as in Phi; only the first of them ends turns.
TWO_ENDS = """
{%- for turn in messages -%}{{ '<|' + turn.role + '|>\n' + turn.content + '<|end|>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
"""
# Several messages make a turn, the last turn ends with another token, and so do calls, as in gpt-oss.
CHANNELS = """
{%- for turn in messages -%}
    {%- if turn.role != 'assistant' -%}{{ '<|start|>' + turn.role + '<|message|>' + turn.content + '<|end|>' }}
    {%- elif turn.tool_calls -%}
        {%- if turn.thinking -%}
            {{ '<|start|>assistant<|channel|>analysis<|message|>' + turn.thinking + '<|end|>' }}
        {%- endif -%}
        {{ '<|start|>assistant to=' + turn.tool_calls[0].function.name + '<|channel|>commentary<|message|>' }}
        {{- (turn.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
    {%- else -%}
        {%- if turn.thinking and loop.last -%}
            {{ '<|start|>assistant<|channel|>analysis<|message|>' + turn.thinking + '<|end|>' }}
        {%- endif -%}
        {{ '<|start|>assistant<|channel|>final<|message|>' + turn.content
            + ('<|return|>' if loop.last else '<|end|>') }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""
# The words of a turn have marks of their own, and every text ends with the header of an answer, as in Command R7B.
WRAPPED = """
{%- for turn in messages -%}
    {{ '<|turn|>' + turn.role + '\n<|text|>' + turn.content + '<|/text|><|end|>' }}
{%- endfor -%}
{{ '<|turn|>assistant\n' }}
"""


@dataclass(frozen=True)
class Family:
    """A template and the tokens it needs.

    Attributes:
        template: Jinja text.
        special: special tokens; the first ends a turn.
        named: those that have a role, such as ``bos_token``. The others are in no list but that of the added tokens.
        plain: added tokens that are not special.
        nfc: whether text is composed first.
    """

    template: str
    special: tuple[str, ...]
    named: dict[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    nfc: bool = False


IM = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
IM_NAMED = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA3_SPECIAL = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
GEMMA_SPECIAL = ("<end_of_turn>", "<start_of_turn>", "<bos>", "<eos>")
FAMILIES = {
    "chatml": Family(CHATML, IM, IM_NAMED, ("<tool_call>", "</tool_call>")),
    "qwen3": Family(QWEN3, IM, IM_NAMED, QWEN_PLAIN, nfc=True),
    "qwen35": Family(QWEN35, IM, IM_NAMED, QWEN_PLAIN, nfc=True),
    "llama3": Family(
        LLAMA3, LLAMA3_SPECIAL, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    ),
    "gemma": Family(GEMMA, GEMMA_SPECIAL, {"bos_token": "<bos>", "eos_token": "<eos>"}),
    "marked": Family(MARKED, IM, IM_NAMED),
    "marked_words": Family(MARKED_WORDS, IM, IM_NAMED),
    "two_ends": Family(
        TWO_ENDS, ("<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"),
        {"eos_token": "<|endoftext|>"},
    ),
    "wrapped": Family(WRAPPED, ("<|end|>", "<|turn|>", "<|text|>", "<|/text|>"), {"eos_token": "<|end|>"}),
    "channels": Family(
        CHANNELS, ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        {"eos_token": "<|return|>"},
    ),
}  # fmt: skip


@cache
def _trained(special: tuple[str, ...], plain: tuple[str, ...], *, nfc: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer.to_str()


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a family's template and tokens; those of Llama 2 are of another kind."""
    if name in ("llama2", "llama2_always"):
        return metaspace_tokenizer("always" if name == "llama2_always" else "first")
    family = FAMILIES[name]
    inner = Tokenizer.from_str(_trained(family.special, family.plain, nfc=family.nfc))
    named: dict[str, Any] = dict(family.named)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **named)
    tokenizer.chat_template = family.template
    return tokenizer


def metaspace_tokenizer(scheme: str = "first") -> PreTrainedTokenizerFast:
    """Blanks are part of words, a text gets one in front (``always``: also behind special tokens), rest is bytes."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?[]/<>'\"()-_é漢"
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    merges = [("▁", letter) for letter in "THabcdefghiPI["] + [("▁a", "n"), ("▁", "▁"), ("e", "r"), ("i", "n")]
    for token in [*letters, *(first + second for first, second in merges)]:
        vocab.setdefault(token, len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = LLAMA2
    return tokenizer
