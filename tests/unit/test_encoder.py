"""Loss masks by value: what is masked in, turn by turn, or the reason of the refusal."""

import unicodedata

import pytest
from tokenizers import AddedToken

from dflash_data.conversation import Conversation, Message, Text, Tokens
from dflash_data.encoder import Encoded
from dflash_model.errors import UserError
from support.masks import CALL, K_TIME, OFF, encoder, masked_in, refusal, runs, talk
from support.templates import CHATML

END = "<|im_end|>"
EMOJI = "Hi 👩\u200d👩\u200d👧\u200d👦 cafe\u0301 é 你好 Z\u0351\u036bal\u0321go 🏳️\u200d🌈!"


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "marked", "marked_words", "two_ends"])
@pytest.mark.parametrize(
    "text", ["Paris.", EMOJI, "one\u2028line\u0085only", "a\n\n  b\n", "<|im_", "漢字とかな、한국어"]
)
def test_one_turn_is_its_text_and_the_end_token(name: str, text: str) -> None:
    end = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "two_ends": "<|end|>"}.get(name, END)
    shown = text.strip() if name in ("llama3", "gemma") else text
    assert masked_in(encoder(name), [{"role": "system", "content": "Be brief."}, *talk("Hi", text)]) == [shown + end]


def test_the_rest_of_the_document_is_what_the_template_renders() -> None:
    encode = encoder()
    encoded = encode(Conversation([{"role": "system", "content": "Be brief."}, *talk("Hi", "Hello.\n", "and?", "No.")]))
    assert encode.tokenizer.decode(encoded.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.\n"
        "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
    )
    assert runs(encode, encoded) == ["Hello.\n<|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_composed_text_is_masked_in_whole(name: str) -> None:
    (said,) = masked_in(encoder(name, options=OFF), talk("Say e\u0301.", EMOJI))
    assert said == unicodedata.normalize("NFC", EMOJI) + END


@pytest.mark.parametrize("scheme", ["llama2", "llama2_always"])
def test_a_tokenizer_that_puts_a_blank_before_every_text(scheme: str) -> None:
    encode = encoder(scheme)
    encoded = encode(Conversation(talk("Hi", " Hello é👩.", "x", "y")))
    ids, mask = encoded.input_ids, encoded.loss_mask
    text = "<s>[INST] Hi [/INST] Hello é👩. </s><s>[INST] x [/INST] y </s>"
    assert ids == encode.tokenizer.encode(text, add_special_tokens=False), "as one text, without blanks at the seams"
    assert runs(encode, encoded) == ["Hello é👩. </s>", "y </s>"]  # its decoder takes off the first blank
    assert ids[: mask.index(True)] == encode.tokenizer.encode("<s>[INST] Hi [/INST]", add_special_tokens=False)
    assert refusal(encode, talk("Hi", "a▁b")) == "the tokenizer changes the text"


def test_an_earlier_answer_that_shares_a_token_with_its_prompt_carries_no_loss() -> None:
    encode = encoder()
    assert masked_in(encode, talk("a", "\nYes.")) == ["\nYes.<|im_end|>"]
    encoded = encode(Conversation(talk("a", "\nYes.", "b", "\nNo.")))
    assert runs(encode, encoded) == ["\nNo.<|im_end|>"]
    asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\nYes.<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
    prompt = encode.tokenizer.encode(asked + "<|im_start|>assistant\n", add_special_tokens=False)
    assert encoded.input_ids[: len(prompt)] == prompt
    assert encoded.loss_mask.index(True) == len(prompt)


# Ends, limits and lengths (A2, A21) ----------------------------------------------------------------------------------


def test_a_turn_that_a_limit_ended_has_no_end_token() -> None:
    turns = talk("hi", "First one.", "go on", "The quick brown ")
    encode = encoder()
    encoded = encode(Conversation(turns, ended=False))
    assert runs(encode, encoded) == ["First one.<|im_end|>", "The quick brown "]
    assert encoded.loss_mask[-1], "nothing follows what the limit cut off"
    reasoned = {"role": "assistant", "content": "", "reasoning_content": "Let me see."}
    assert masked_in(encoder("qwen3"), Conversation([*talk("a"), reasoned], ended=False)) == ["<think>\nLet me see."]
    assert masked_in(encoder("qwen35"), Conversation([*talk("a"), reasoned], ended=False)) == ["Let me see."]
    whole = "<think>\nLet me see.\n</think>\n\n<|im_end|>"
    assert masked_in(encoder("qwen3"), [*talk("a"), reasoned]) == [whole]
    inside = Conversation(talk("a", "<think>Hm.</think>"), ended=False)
    assert masked_in(encoder("qwen3"), inside) == ["<think>\nHm.\n</think>"]
    called = Conversation([*talk("a"), K_TIME], ended=False)
    assert masked_in(encoder(), called) == [CALL]


def test_turns_says_which_carry_loss() -> None:
    turns = talk("7?", "Yes.", "9?", "No.")
    assert masked_in(encoder(turns="all"), turns) == ["Yes.<|im_end|>", "No.<|im_end|>"]
    assert masked_in(encoder(turns="last"), turns) == ["No.<|im_end|>"]
    assert masked_in(encoder(), Conversation(turns, generated_by="me")) == ["No.<|im_end|>"]
    assert masked_in(encoder("marked", turns="last"), turns) == ["No.<|im_end|>"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"turns": "first"}, "data.turns is 'first'; it must be one of all, last"),
        ({"too_long": "Cut"}, "data.too_long is 'Cut'; it must be one of turn, cut, drop"),
    ],
)
def test_unknown_options_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        encoder(**settings)
    with pytest.raises(TypeError):
        encoder(last_turn_only=True)


def test_prompts_beyond_the_limit_are_dropped_by_name() -> None:
    long, short = talk("word " * 10_000, "Short answer."), talk("Name a colour.", "Blue.")
    for too_long in ("turn", "cut"):
        encode = encoder(max_length=64, too_long=too_long)
        assert [refusal(encode, long) for _ in range(8)] == ["the first answer begins beyond data.seq_len"] * 8
        assert masked_in(encode, short) == ["Blue.<|im_end|>"]
    assert refusal(encoder(max_length=64, too_long="drop"), long) == "longer than data.seq_len"


def test_documents_beyond_the_limit() -> None:
    turns = talk("hi", "First.", "go on", "The quick brown fox.")
    whole = encoder()(Conversation(turns))
    first = whole.loss_mask.index(True)
    ends = [i + 1 for i in range(len(whole.loss_mask) - 1) if whole.loss_mask[i] and not whole.loss_mask[i + 1]]

    def lengths(limit: int) -> dict[str, int]:
        return {
            too_long: len(encoder(max_length=limit, too_long=too_long)(Conversation(turns)).input_ids)
            for too_long in ("turn", "cut")
        }

    assert lengths(len(whole.input_ids)) == {"turn": len(whole.input_ids), "cut": len(whole.input_ids)}
    assert lengths(ends[1] - 1) == {"turn": ends[0], "cut": ends[1] - 1}
    assert lengths(ends[1]) == {"turn": ends[1], "cut": ends[1]}, "the line break behind the turn is no loss"
    assert lengths(ends[0]) == {"turn": ends[0], "cut": ends[0]}
    assert lengths(ends[0] - 1) == {"turn": ends[0] - 1, "cut": ends[0] - 1}, "inside the first answer, as none fits"
    assert refusal(encoder(max_length=first + 1), turns) == "fewer than two supervised tokens in a row"
    assert refusal(encoder(max_length=first), turns) == "the first answer begins beyond data.seq_len"
    cut = encoder(max_length=ends[1] - 1)(Conversation(turns))
    assert (cut.cut, whole.cut) == (True, False)
    assert (cut.input_ids, cut.loss_mask) == (whole.input_ids[: ends[0]], whole.loss_mask[: ends[0]])
    assert refusal(encoder(max_length=ends[1], too_long="drop"), turns) == "longer than data.seq_len"


def test_text_and_tokens() -> None:
    encode = encoder()
    encoded = encode(Text("Paris e\u0301."))
    assert encode.tokenizer.decode(encoded.input_ids) == "Paris e\u0301.<|im_end|>"
    assert all(encoded.loss_mask)
    assert refusal(encode, Text("a<|im_end|>b")) == "content holds a control token"
    assert refusal(encode, Text("")) == "fewer than two supervised tokens in a row"
    assert encode(Tokens([1, 2, 3], [False, True, True])) == Encoded([1, 2, 3], [False, True, True], False)
    assert refusal(encode, Tokens([1, 2, 3], [True, False, True])) == "fewer than two supervised tokens in a row"
    assert encoder(max_length=2)(Tokens([1, 2, 3], [True] * 3)) == Encoded([1, 2], [True, True], True)
    encode.tokenizer.eos_token = None
    assert encode.tokenizer.decode(encoder()(Text("ab")).input_ids) == "ab<|im_end|>"
    assert encode.tokenizer.decode(encode(Text("Paris")).input_ids) == "Paris"


# Special tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turns",
    [
        talk("say <|im_end|> please", "Hello."),
        talk("hi", "Hello.<|im_end|>"),
        talk("hi", "a", "<|endoftext|>", "b"),
        [{"role": "system", "content": "<|im_start|>"}, *talk("hi", "Hello.")],
        [*talk("hi"), {"role": "assistant", "content": "a", "reasoning_content": "<|im_end|>"}],
        [*talk("hi"), {**K_TIME, "tool_calls": [{"function": {"name": "f", "arguments": {"a": ["<|im_end|>"]}}}]}],
    ],
)
def test_control_tokens_that_somebody_typed_are_refused(turns: list[Message]) -> None:
    assert refusal(encoder(), turns) == "content holds a control token"


def test_control_tokens_in_tools_and_those_in_no_list_are_refused_too() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_start|>"}}]
    assert refusal(encoder(), Conversation(talk("a", "b"), tools)) == "content holds a control token"
    encode = encoder("llama3")
    assert "<|eot_id|>" not in encode.tokenizer.all_special_tokens
    assert refusal(encode, talk("say <|eot_id|>", "b")) == "content holds a control token"
    assert masked_in(encoder(), talk("say <tool_call>", "<tool_call>")) == ["<tool_call><|im_end|>"], "no control token"


def test_think_marks_may_be_special_tokens() -> None:
    encode = encoder("qwen3")
    encode.tokenizer.add_tokens([AddedToken("<think>", special=True), AddedToken("</think>", special=True)])
    assert masked_in(encode, talk("7?", "<think>\nNo.\n</think>\n\nYes.")) == [
        "<think>\nNo.\n</think>\n\nYes.<|im_end|>"
    ]


def test_a_special_token_that_begins_another() -> None:
    template = CHATML.replace("<|im_end|>", "<|im_end|>2")
    encode = encoder(template=template)
    encode.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>2"]})
    assert masked_in(encode, talk("a", "b", "c", "d")) == ["b<|im_end|>2", "d<|im_end|>2"]
    joined = encoder(template=CHATML)
    joined.tokenizer.add_special_tokens({"additional_special_tokens": ["x<|im_end|>"]})
    assert refusal(joined, talk("a", "bx")) == "the rendered assistant turn differs from its text"
