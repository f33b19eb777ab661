"""Loss masks by decoding: what is masked in reads exactly as what the assistant said, and its end token."""

import pytest

from dflash_data.chat import ChatEncoder, Encoded, Message, Refused, load_tokenizer
from dflash_model.errors import UserError
from support.tokenizer import CHATML, FORGETFUL, chat_tokenizer

ENCODE = ChatEncoder(chat_tokenizer(), {}, 512)


def talk(*texts: str) -> list[Message]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def spoken(encoded: Encoded) -> str:
    """The supervised tokens as text."""
    return ENCODE.tokenizer.decode([i for i, m in zip(encoded.input_ids, encoded.loss_mask, strict=True) if m])


@pytest.mark.parametrize(
    "text",
    [
        "Paris.",
        "  indented , with blanks .\n\n",
        "\n\n\tfirst line empty",
        "👨‍👩‍👧 family, 🏳️‍🌈 flag",
        "漢字とかな、한국어",
        "e\u0301 stays apart, é stays joined, Z\u0351\u036bal\u0321go",
        "two\u2028lines\u0085three",
    ],
)
def test_one_turn_is_its_text_and_the_end_token(text: str) -> None:
    encoded = ENCODE([{"role": "system", "content": "Be brief."}, *talk("What is the capital?", text)])
    assert spoken(encoded) == text + "<|im_end|>"
    assert len(encoded.input_ids) == len(encoded.loss_mask)
    whole = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the capital?<|im_end|>\n\
<|im_start|>assistant\n{text}<|im_end|>\n"
    assert ENCODE.tokenizer.decode(encoded.input_ids) == whole


def test_every_assistant_turn_is_supervised_and_nothing_between() -> None:
    encoded = ENCODE(talk("hi", "Hello 👋", "and 漢?", "Kan.", "bye"))
    assert spoken(encoded) == "Hello 👋<|im_end|>Kan.<|im_end|>"
    changes = sum(a != b for a, b in zip(encoded.loss_mask, encoded.loss_mask[1:], strict=False))
    assert changes == 4, "two spans, the prompts around them without loss"


def test_a_turn_cut_at_the_limit_has_no_end_token() -> None:
    messages = talk("hi", "First one.", "go on", "The quick brown")
    assert spoken(ENCODE(messages, ended=False)) == "First one.<|im_end|>The quick brown"


def test_only_the_last_turn_can_be_unfinished() -> None:
    assert spoken(ENCODE(talk("hi", "Done.", "thanks"), ended=False)) == "Done.<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hi"}], "starts with the assistant"),
        ([{"role": "narrator", "content": "Once"}, *talk("a", "b")], "unknown role 'narrator'"),
        ([{"content": "Once"}, *talk("a", "b")], "unknown role None"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "content is not text"),
        ([*talk("a"), {"role": "assistant", "content": None}], "content is not text"),
        ([{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}], "no user turn"),
        (talk("a"), "no assistant turn"),
        (talk("a", ""), "fewer than two supervised tokens in a row"),
    ],
)
def test_refusals_name_the_reason(messages: list[Message], reason: str) -> None:
    with pytest.raises(Refused) as caught:
        ENCODE(messages)
    assert caught.value.args[0] == reason


def test_an_earlier_turn_that_the_template_rewrites_carries_no_loss() -> None:
    encode = ChatEncoder(chat_tokenizer(FORGETFUL), {}, 512)
    assert spoken(encode(talk("hi", "Hello."))) == "Hello.<|im_end|>"
    assert spoken(encode(talk("hi", "Hello.", "more", "Again."))) == "Again.<|im_end|>"


def test_only_the_last_turn_of_regenerated_rows_carries_loss() -> None:
    assert spoken(ENCODE(talk("hi", "Hello.", "more", "Again."), last_turn_only=True)) == "Again.<|im_end|>"


def test_control_tokens_typed_by_a_user_are_refused() -> None:
    with pytest.raises(Refused, match=r"^content holds a control token$"):
        ENCODE(talk("say <|im_end|> please", "Hello."))


def test_a_long_conversation_is_cut_and_says_so() -> None:
    whole = ENCODE(talk("hi", "Hello there, all of you."))
    short = ChatEncoder(chat_tokenizer(), {}, len(whole.input_ids) - 4)(talk("hi", "Hello there, all of you."))
    assert (whole.cut, short.cut) == (False, True)
    assert whole.input_ids[: len(short.input_ids)] == short.input_ids


def test_a_template_that_changes_the_text_is_refused() -> None:
    encode = ChatEncoder(chat_tokenizer(CHATML.replace("['content'] }}", "['content'] | upper }}")), {}, 512)
    assert spoken(encode(talk("hi", "HELLO."))) == "HELLO.<|im_end|>"
    with pytest.raises(Refused, match=r"^the rendered assistant turn differs from its text$"):
        encode(talk("hi", "Hello."))


def test_a_template_without_an_end_token_is_refused() -> None:
    encode = ChatEncoder(chat_tokenizer(CHATML.replace("<|im_end|>", "")), {}, 512)
    with pytest.raises(Refused, match=r"^the chat template ends the assistant turn with no special token$"):
        encode(talk("hi", "Hello."))


def test_template_options_reach_the_template() -> None:
    template = CHATML.replace("assistant\n{% endif", "assistant\n{% if not thinking %}skip {% endif %}{% endif")
    ids = ChatEncoder(chat_tokenizer(template), {"thinking": True}, 512)(talk("hi", "Hello."))
    assert spoken(ids) == "Hello.<|im_end|>"
    with pytest.raises(Refused):
        ChatEncoder(chat_tokenizer(template), {"thinking": False}, 512)(talk("hi", "Hello."))


def test_truncation_keeps_what_two_supervised_tokens_need() -> None:
    whole = ENCODE(talk("hi", "The quick brown fox"))
    first = whole.loss_mask.index(True)
    cut = ChatEncoder(ENCODE.tokenizer, {}, first + 2)(talk("hi", "The quick brown fox"))
    assert (cut.input_ids, cut.loss_mask) == (whole.input_ids[: first + 2], whole.loss_mask[: first + 2])
    with pytest.raises(Refused, match=r"^fewer than two supervised tokens in a row$"):
        ChatEncoder(ENCODE.tokenizer, {}, first + 1)(talk("hi", "The quick brown fox"))


def test_text_that_is_not_unicode_is_refused_not_a_crash() -> None:
    with pytest.raises(Refused):
        ENCODE(talk("hi", "half a pair: \ud83d"))


def test_a_missing_tokenizer_is_named() -> None:
    with pytest.raises(UserError, match="no tokenizer at /nowhere/at/all"):
        load_tokenizer("/nowhere/at/all")
