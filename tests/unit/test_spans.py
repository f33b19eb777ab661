"""Which part of a rendered conversation carries loss, by value: reasoning, calls, roles, and how templates behave."""

from typing import Any

import pytest

from dflash_data.conversation import Conversation, Message, Text
from dflash_model.errors import UserError
from support.masks import CALL, K_TIME, OFF, encoder, masked_in, refusal, runs, talk
from support.templates import CHATML, MARKED

END = "<|im_end|>"
K8_TURNS = [*talk("What time is it in Oslo?"), K_TIME, {"role": "tool", "content": "14:05"}, *talk("", "Two.")[1:]]
REASONED = {"role": "assistant", "content": "Yes.", "reasoning_content": "No divisor."}
XML_CALL = (
    "<tool_call>\n<function=get_time>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
)  # fmt: skip


# Reasoning (A8, A9) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "lead"), [("qwen3", "<think>\n"), ("qwen35", "")])
@pytest.mark.parametrize(
    "content",
    ["<think>\nNo divisor.\n</think>\n\nYes.", "<think>No divisor.</think>Yes.", "No divisor.</think>Yes."],
)
def test_reasoning_is_masked_in_wherever_the_row_has_it(name: str, lead: str, content: str) -> None:
    encode = encoder(name)
    apart, inside = encode(Conversation([*talk("7?"), REASONED])), encode(Conversation(talk("7?", content)))
    assert runs(encode, apart) == [lead + "No divisor.\n</think>\n\nYes.<|im_end|>"]
    assert (inside.input_ids, inside.loss_mask) == (apart.input_ids, apart.loss_mask)


def test_a_template_that_knows_no_reasoning_leaves_it_in_the_content() -> None:
    assert masked_in(encoder(), talk("7?", "<think>No.</think>Yes.")) == ["<think>No.</think>Yes.<|im_end|>"]
    assert refusal(encoder(), [*talk("7?"), REASONED]) == "the chat template does not show reasoning"
    earlier = [*talk("7?"), REASONED, *talk("9?", "No.")]
    assert masked_in(encoder(), earlier) == ["No.<|im_end|>"], (
        "its reasoning is missing, so the first turn is not its own"
    )


def test_an_earlier_turn_whose_reasoning_is_dropped_carries_no_loss() -> None:
    turns = [*talk("7?"), REASONED, *talk("9?", "No.")]
    assert masked_in(encoder("qwen3"), turns) == ["No.<|im_end|>"]
    inside = talk("7?", "<think>\nNo divisor.\n</think>\n\nYes.", "9?", "No.")
    assert masked_in(encoder("qwen3"), inside) == ["No.<|im_end|>"]
    assert masked_in(encoder("qwen35"), turns) == ["No.<|im_end|>"], "an empty block is not its words"


def test_earlier_turns_without_reasoning() -> None:
    turns = talk("7?", "Yes.", "9?", "No.")
    assert masked_in(encoder("qwen3"), turns) == ["Yes.<|im_end|>", "No.<|im_end|>"]
    assert masked_in(encoder("qwen3", options=OFF), turns) == ["No.<|im_end|>"], "the prompt of the first had a block"


def test_the_prompt_that_opens_a_block_has_its_own_token() -> None:
    encode = encoder("qwen35")
    encoded = encode(Conversation(talk("7?", "<think>\n\n</think>\n\nYes.")))
    assert runs(encode, encoded) == ["\n</think>\n\nYes.<|im_end|>"], "a block that the row wrote is its words"
    prompt = "<|im_start|>user\n7?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    ids = encode.tokenizer.encode(prompt, add_special_tokens=False)
    assert encode.tokenizer.encode(prompt + "\n</think>", add_special_tokens=False)[: len(ids)] != ids
    assert encoded.input_ids[: encoded.loss_mask.index(True)] == ids, "not the joint token of two line breaks"


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_reasoning_behind_a_prompt_without_thinking_is_refused(name: str) -> None:
    encode = encoder(name, options=OFF)
    assert masked_in(encode, talk("7?", "Yes.")) == ["Yes.<|im_end|>"]
    reason = "the assistant turn does not begin as the generation prompt does"
    assert refusal(encode, [*talk("7?"), REASONED]) == reason


def test_reasoning_can_be_left_without_loss() -> None:
    for name in ("qwen3", "qwen35"):
        encode = encoder(name, reasoning=False)
        for turn in (REASONED, talk("", "Yes.")[1], talk("", "<think>No.</think>Yes.")[1]):
            assert masked_in(encode, [*talk("7?"), turn]) == ["Yes.<|im_end|>"]
    assert masked_in(encoder(reasoning=False), talk("7?", "<think>No.</think> Yes.")) == [" Yes.<|im_end|>"]
    assert masked_in(encoder(reasoning=False), talk("7?", "\n Yes.")) == ["\n Yes.<|im_end|>"], "no block, no change"
    assert masked_in(encoder("channels", reasoning=False), [*talk("7?"), REASONED]) == ["Yes.<|return|>"]


@pytest.mark.parametrize("content", ["No divisor.", "No", "divisor.", "."])
def test_an_answer_that_stands_in_its_reasoning_too(content: str) -> None:
    turn = REASONED | {"content": content}
    whole = f"<think>\nNo divisor.\n</think>\n\n{content}<|im_end|>"
    assert masked_in(encoder("qwen3"), [*talk("7?"), turn]) == [whole]
    assert masked_in(encoder("qwen3", reasoning=False), [*talk("7?"), turn]) == [content + END]


def test_an_unfinished_block_in_the_content_is_refused_where_the_template_adds_one() -> None:
    turns = talk("7?", "<think>\nNo divi")
    assert refusal(encoder("qwen3"), turns) == "the rendered assistant turn differs from its text"
    assert masked_in(encoder(), Conversation(turns, ended=False)) == ["<think>\nNo divi"]


# Tools (A5) ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("chatml", {}, [CALL + END, "Two.<|im_end|>"]),
        ("qwen3", {}, [CALL + END, "Two.<|im_end|>"]),
        ("qwen3", OFF, ["Two.<|im_end|>"]),  # the call is shown without the block of its prompt
        ("qwen35", OFF, [XML_CALL + END, "Two.<|im_end|>"]),
        ("qwen35", {}, [XML_CALL + END, "Two.<|im_end|>"]),
        ("llama3", {}, ['{"name": "get_time", "parameters": {"city": "Oslo"}}<|eot_id|>', "Two.<|eot_id|>"]),
        ("channels", {}, [' to=get_time<|channel|>commentary<|message|>{"city": "Oslo"}<|call|>',
                          "<|channel|>final<|message|>Two.<|return|>"]),
    ],
)  # fmt: skip
def test_calls_are_masked_in_and_their_results_are_not(name: str, options: dict[str, Any], expected: list[str]) -> None:
    encode = encoder(name, options=options)
    encoded = encode(Conversation(K8_TURNS, [{"type": "function", "function": {"name": "get_time"}}]))
    assert runs(encode, encoded) == expected
    assert "14:05" in encode.tokenizer.decode(encoded.input_ids)


def test_words_and_reasoning_before_a_call() -> None:
    turns = [*talk("Time?"), K_TIME | {"content": "Let me see.", "reasoning_content": "Ask."}]
    assert masked_in(encoder("qwen3"), turns) == [f"<think>\nAsk.\n</think>\n\nLet me see.\n{CALL}{END}"]
    assert masked_in(encoder("qwen3", reasoning=False), turns) == [f"Let me see.\n{CALL}{END}"]
    bare = [*talk("Time?"), K_TIME | {"reasoning_content": "t"}]
    assert masked_in(encoder("qwen35"), bare) == [f"t\n</think>\n\n{XML_CALL}{END}"]
    assert masked_in(encoder("qwen3", reasoning=False), bare) == [CALL + END]
    assert masked_in(encoder("channels"), bare)[0].startswith(
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant to"
    )
    assert refusal(encoder("llama3"), turns) == "the chat template does not show reasoning"
    with_words = [*talk("Time?"), K_TIME | {"content": "Let me see."}]
    assert refusal(encoder("llama3"), with_words) == "the rendered assistant turn differs from its text"
    answered = [*talk("Time?"), K_TIME, {"role": "tool", "content": "14:05"}, *talk("", "Two.")[1:]]
    assert refusal(encoder("marked"), [*talk("Time?"), K_TIME]) == "the chat template does not show tool calls"
    assert refusal(encoder("marked"), answered) == "the chat template does not show tool calls", (
        "an empty turn before it"
    )


def test_a_template_s_own_refusal_is_named_and_short() -> None:
    two = K_TIME | {"tool_calls": K_TIME["tool_calls"] * 2}
    assert refusal(encoder("llama3"), [*talk("Time?"), two]) == "the chat template refuses it: Only one call at a time!"
    long = CHATML + "{{ raise_exception('much ' * 100) }}"
    assert refusal(encoder(template=long), talk("a", "b")) == "the chat template refuses it: " + ("much " * 20)
    odd = (
        CHATML + "{% if messages[0].content == 'x' %}{% for a in messages[0].content | items %}{% endfor %}{% endif %}"
    )
    assert masked_in(encoder(template=odd), talk("a", "b")) == ["b<|im_end|>"]
    assert refusal(encoder(template=odd), talk("x", "b")).startswith("the chat template refuses it: ")
    undefined = CHATML + "{{ messages[1].nothing.more }}"
    assert refusal(encoder(template=undefined), talk("a", "b")).startswith(
        "the chat template refuses it: 'dict object'"
    )


# Roles (A3, A4) ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "users", "assistants"),
    [
        ("chatml", ["Two.<|im_end|>"], ["One.<|im_end|>", "Two.<|im_end|>"]),
        ("qwen35", ["Two.<|im_end|>"], ["One.<|im_end|>", "Two.<|im_end|>"]),
        ("gemma", "alternate", "alternate"),
        ("llama2", "alternate", "alternate"),
        ("qwen3", ["Two.<|im_end|>"], "the chat template rewrites earlier turns"),
    ],
)
def test_turns_of_one_role_in_a_row(name: str, users: list[str] | str, assistants: list[str] | str) -> None:
    rows = [[*talk("a"), *talk("b", "Two.")], [*talk("a", "One."), *talk("", "Two.")[1:]]]
    for row, expected in zip(rows, (users, assistants), strict=True):
        if isinstance(expected, list):
            assert masked_in(encoder(name), row) == expected
        else:
            assert expected in refusal(encoder(name), row)


def test_what_follows_the_last_answer_is_left_out() -> None:
    encode = encoder("qwen3")
    answered, asked = talk("7?", "Yes."), talk("7?", "Yes.", "9?")
    assert encode(Conversation(asked)) == encode(Conversation(answered))
    assert masked_in(encode, Conversation(asked, ended=False)) == ["Yes.<|im_end|>"], "that turn had an end"


def test_empty_answers() -> None:
    for text in ("", " \n"):
        assert refusal(encoder("qwen3"), talk("a", text)) == "the assistant turn is empty"
        assert masked_in(encoder(), talk("a", text, "b", "Yes.")) == ["Yes.<|im_end|>"]


# Templates -----------------------------------------------------------------------------------------------------------


def test_a_template_may_add_text_behind_the_end_token() -> None:
    assert masked_in(encoder("two_ends"), talk("a", "b", "c", "d")) == ["b<|end|>", "d<|end|>"]
    footer = CHATML + "{% if not add_generation_prompt %}That was b.{% endif %}"
    assert masked_in(encoder(template=footer), talk("a", "b", "c", "b")) == ["b<|im_end|>", "b<|im_end|>"]


def test_a_template_may_close_the_words_before_the_end_token() -> None:
    turns = talk("a", "b", "c", "d")
    wrapped = ["<|text|>b<|/text|><|end|>", "<|text|>d<|/text|><|end|>"]
    assert masked_in(encoder("wrapped"), turns) == wrapped
    assert masked_in(encoder("wrapped"), Conversation(turns, ended=False)) == [wrapped[0], "<|text|>d"]
    assert masked_in(encoder("wrapped", reasoning=False), turns) == wrapped, "that mark is no reasoning"
    inside = talk("a", "<think>b</think>c")
    assert masked_in(encoder("wrapped"), inside) == ["<|text|><think>b</think>c<|/text|><|end|>"]


def test_a_template_that_always_ends_with_the_header_of_an_answer() -> None:
    """As Llama 3 was first published, with another token as the end of a text."""
    header = "<|start_header_id|>' + {} + '<|end_header_id|>\n\n"
    template = "{%- for turn in messages -%}{{ '" + header.format("turn.role") + "' + turn.content + '<|eot_id|>' }}"
    template += "{%- endfor -%}{{ '" + header.format("'assistant'") + "' }}"
    encode = encoder("llama3", template=template)
    encode.tokenizer.eos_token = "<|end_of_text|>"
    assert masked_in(encode, talk("a", "b", "c", "d")) == ["b<|eot_id|>", "d<|eot_id|>"]


def test_blanks_before_an_answer_are_its_own() -> None:
    for name in ("qwen3", "qwen35"):
        said = masked_in(encoder(name), talk("a", "  - one\n  - two"))
        assert said == [("  - one" if name == "qwen3" else "- one") + "\n  - two<|im_end|>"], "the second trims"
    encode = encoder("qwen3")
    encoded, off = (e(Conversation(talk("a", " Paris"))) for e in (encode, encoder("qwen3", options=OFF)))
    assert (encoded.input_ids, encoded.loss_mask) == (off.input_ids, off.loss_mask), "as a server without thinking"


def test_the_content_may_close_the_block_that_the_prompt_opens() -> None:
    template = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    )
    template += "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>' }}{%- endif -%}"
    assert masked_in(encoder(template=template), talk("a", "<think>Hm.</think>Yes.")) == ["Hm.</think>Yes.<|im_end|>"]


def test_a_template_without_a_generation_prompt_is_refused() -> None:
    template = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    )
    assert refusal(encoder(template=template), talk("a", "b")) == "the chat template has no generation prompt"


def test_marks_of_turns_that_are_not_called_special_are_control_tokens_too() -> None:
    encode = encoder(template=CHATML.replace("<|im_start|>", "<<turn>>").replace("<|im_end|>", "<<end>>"))
    encode.tokenizer.add_tokens(["<<turn>>", "<<end>>", "<tool_call>"])
    assert masked_in(encode, talk("a", "b <tool_call>")) == ["b <tool_call><<end>>"]
    assert refusal(encode, talk("a<<turn>>", "b")) == "content holds a control token"


def test_a_template_that_ends_earlier_turns_in_another_way() -> None:
    turns = talk("a", "Hello.", "b", "Hello.")
    assert masked_in(encoder("channels"), turns) == ["<|channel|>final<|message|>Hello.<|return|>"]
    last_only = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
        "{{ '[assistant] ' if add_generation_prompt else eos_token }}"
    )
    assert masked_in(encoder(template=last_only), turns) == ["Hello. <|im_end|>"], "no user text in between"


def test_a_template_that_rewrites_turns() -> None:
    forgetful = CHATML.replace("turn.content }}", "(turn.content if turn.role == 'user' or loop.last else '') }}")
    encode = encoder(template=forgetful)
    assert masked_in(encode, talk("hi", "Hello.", "more", "Again.")) == ["Again.<|im_end|>"]
    count = "{{ messages | length }}"
    assert refusal(encoder(template=count + CHATML), talk("a", "b")) == "the chat template rewrites earlier turns"


def test_a_template_that_changes_the_text_is_refused() -> None:
    encode = encoder(template=CHATML.replace("turn.content }}", "turn.content | upper }}"))
    assert masked_in(encode, talk("hi", "HELLO.")) == ["HELLO.<|im_end|>"]
    assert refusal(encode, talk("hi", "Hello.")) == "the rendered assistant turn differs from its text"
    signed = encoder(template=CHATML.replace("turn.content }}", "turn.content + ' Bye.' }}"))
    assert refusal(signed, talk("hi", "Hello.")) == "the rendered assistant turn differs from its text"


@pytest.mark.parametrize("turns", [talk("hi", "Hello."), [*talk("Time?"), K_TIME]])
def test_a_template_without_an_end_token_is_refused(turns: list[Message]) -> None:
    encode = encoder(template=CHATML.replace("<|im_end|>", ""))
    assert refusal(encode, turns) == "the chat template ends the assistant turn with no special token"


def test_generation_markers_only_narrow_what_carries_loss() -> None:
    turns = talk("hi", "Hello.", "more", "Again.")
    deaf = MARKED.partition("{%- if add_generation_prompt")[0]
    assert masked_in(encoder("marked", template=deaf), turns) == ["Hello.<|im_end|>", "Again.<|im_end|>"]
    header, marked = "{{ '<|im_start|>' + turn.role + '\n' }}", "{%- generation -%}"
    whole = MARKED.replace(header, "{%- if turn.role != 'assistant' -%}" + header + "{%- endif -%}")
    whole = whole.replace(marked, marked + header)
    assert masked_in(encoder("marked", template=whole), turns) == ["Hello.<|im_end|>", "Again.<|im_end|>"]
    some = MARKED.replace("turn.role == 'assistant'", "turn.role == 'assistant' and loop.last")
    reason = "the chat template marks another number of turns than there are"
    assert refusal(encoder("marked", template=some), turns) == reason
    assert masked_in(encoder("marked", template=some), talk("hi", "Hello.")) == ["Hello.<|im_end|>"]
    asked = MARKED.replace("turn.role == 'assistant'", "turn.role == 'user'")
    reason = "the chat template's generation marks miss the assistant turn"
    assert refusal(encoder("marked", template=asked), talk("hi", "Hello.")) == reason


def test_template_options_reach_the_template() -> None:
    template = CHATML.replace("assistant\n' }}{%- endif", "assistant\n' + ('' if thinking else 'skip ') }}{%- endif")
    assert masked_in(encoder(template=template, options={"thinking": True}), talk("hi", "Hello.")) == [
        "Hello.<|im_end|>"
    ]
    reason = "the assistant turn does not begin as the generation prompt does"
    assert refusal(encoder(template=template), talk("hi", "Hello.")) == reason


def test_a_missing_or_broken_template_is_the_users_to_fix() -> None:
    for template, message in (
        ("", "has no chat template"),
        ("{% if %}", "is not valid"),
        ({"a": CHATML}, "cannot be chosen"),
    ):
        encode = encoder()
        encode.tokenizer.chat_template = template
        with pytest.raises(UserError, match=message):
            encode(Conversation(talk("a", "b")))
        assert encode(Text("Text needs no template.")).loss_mask


def test_a_tokenizer_may_have_another_template_for_tools() -> None:
    encode = encoder()
    loud = CHATML.replace("turn.content }}", "turn.content | upper }}")
    encode.tokenizer.chat_template = {"default": loud, "tool_use": CHATML}
    tools = [{"type": "function", "function": {"name": "get_time"}}]
    assert masked_in(encode, Conversation(K8_TURNS, tools)) == [CALL + END, "Two.<|im_end|>"]
    assert masked_in(encode, talk("a", "B")) == ["B<|im_end|>"]
