"""The tokenizer is reversible, and what an engine says is a pure function of its inputs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.sim import text


@given(st.text())
def test_tokens_give_the_prompt_back(prompt: str) -> None:
    assert text.detokenize(text.tokenize(prompt)) == prompt


@given(st.binary(max_size=6))
def test_a_token_id_is_its_bytes(piece: bytes) -> None:
    assert text.token_bytes(text.token_id(piece)) == piece
    assert text.token_id(piece) < 2**53  # exact in every JSON reader


@pytest.mark.parametrize("wrong", [0, -1, 2**56, 0x0200])
def test_other_numbers_are_no_tokens(wrong: int) -> None:
    with pytest.raises(ValueError, match="not in the vocabulary"):
        text.token_bytes(wrong)


def test_text_and_its_token_ids_are_the_same_prompt() -> None:
    prompt = "Where does the narwhal breathe? 🐋"
    assert text.expected_text(text.tokenize(prompt), 40) == text.expected_text(prompt, 40)


def test_every_input_matters() -> None:
    said = [
        text.expected_text("a", 40),
        text.expected_text("b", 40),
        text.expected_text("a", 40, model="other"),
        text.expected_text("a", 40, seed=1),
        text.expected_text("a", 40, index=1),
        text.expected_chat_text([{"role": "user", "content": "a"}], 40),
        text.expected_chat_text([{"role": "system", "content": "a"}], 40),
    ]
    assert len(set(said)) == len(said)
    assert text.expected_text("a", 40) == said[0]


def test_longer_answers_begin_like_shorter_ones() -> None:
    short, long = text.expected_text("prompt", 50), text.expected_text("prompt", 200)
    assert long.startswith(short.rstrip("�"))


def test_characters_are_split_over_tokens_and_never_over_texts() -> None:
    spoken = list(itertools.chain(*(text.deltas(text.content_of("m", b"%d" % at), 100) for at in range(20))))
    empty = [delta for _, delta in spoken if not delta]
    multi_byte = [delta for _, delta in spoken if len(delta.encode()) > len(delta)]
    assert len(empty) > 20
    assert len(multi_byte) > 200
    for _, delta in spoken:
        delta.encode()  # no half of a surrogate pair


def test_an_answer_that_ends_inside_a_character_says_so() -> None:
    cut = [at for at in range(1, 200) if text.expected_text("prompt", at).endswith("�")]
    assert cut, "two hundred lengths and none inside a character"
    assert "�" not in text.expected_text("prompt", cut[0] - 1)


def test_stop_strings_end_the_text_before_themselves() -> None:
    whole = text.expected_text("prompt", 60)
    word = whole[20:23]
    assert text.expected_text("prompt", 60, stop=(word,)) == whole[: whole.index(word)]
    assert text.expected_text("prompt", 60, stop=("not in there",)) == whole


def test_freed_blocks_hold_no_prompt() -> None:
    assert text.freed_content("cmpl-1") != text.freed_content("cmpl-2")
    assert text.freed_content("cmpl-1") != text.content_of(text.MODEL, b"cmpl-1")


def test_chat_content_in_parts_is_the_text_of_its_parts() -> None:
    whole = [{"role": "user", "content": "one two"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    assert text.render_chat(parts) == text.render_chat(whole)
    with_tool = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert "tool_calls" in text.render_chat(with_tool)
