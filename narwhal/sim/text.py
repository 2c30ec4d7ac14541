"""What a simulated engine says: a reversible tokenizer and text that is a pure function of its inputs.

An answer depends on the model, the whole prompt, the sampling seed and the choice's index, and on nothing else, so that
a test knows the right answer beforehand (`expected_text`, `expected_chat_text`). It depends on the prompt only through
its *content*: a digest that stands for the KV cache. A decode engine speaks from the content it pulled, so another
prompt's KV gives another prompt's text.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

MODEL = "sim-model"
COMPLETION_MAX_TOKENS = 16  # the OpenAI default of /v1/completions
PROMPT_BYTES_PER_TOKEN = 4

# Words of one to six bytes; six is the most that a token id can carry (see `token_id`).
_WORDS = (
    " the| of| and| a| in| to| is| ice| sea| cold| whale| tusk| deep| dive| pod| swim| under| north| wave| krill| floe",
    " blue| long| calm| song| far| near| one| two| three| four|ing|ed|er|ly|s|,|.|;|\n| –| —| é| ü| ñ| ø| 海| 鯨",
    '深|北|角笛| 🐋| 🐟| ❄| €| ½| °| "|\\| {| }',
)
PIECES: tuple[bytes, ...] = tuple(piece.encode() for piece in "|".join(_WORDS).split("|"))

# Characters whose bytes are spread over two tokens, as in byte-level vocabularies: the first token's event has no text.
SPLIT: tuple[tuple[bytes, bytes], ...] = tuple((c.encode()[:2], c.encode()[2:]) for c in ("🐳", "🌊", "🧊", "鱼"))
_SPLIT_EVERY = 12  # about one token in so many begins such a character


def token_id(piece: bytes) -> int:
    """The token id of up to six bytes: they themselves, after a leading 1 (so ids stay exact in every JSON reader)."""
    return int.from_bytes(b"\x01" + piece, "big")


def token_bytes(token: int) -> bytes:
    """The bytes of a token id. Raises ValueError for a number that is not one."""
    raw = token.to_bytes(8, "big").lstrip(b"\x00") if 0 < token < 2**56 else b""
    if not raw.startswith(b"\x01"):
        raise ValueError(f"token id {token} is not in the vocabulary")
    return raw[1:]


def tokenize(text: str) -> list[int]:
    """The token ids of a prompt: four bytes of its UTF-8 form each."""
    return token_ids(prompt_bytes(text))


def token_ids(raw: bytes) -> list[int]:
    """The token ids of a prompt's bytes."""
    step = PROMPT_BYTES_PER_TOKEN
    return [token_id(raw[at : at + step]) for at in range(0, len(raw), step)]


def detokenize(tokens: Sequence[int]) -> str:
    """The text of token ids; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an unknown id."""
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


def count_tokens(raw: bytes) -> int:
    """How many tokens a prompt of these bytes has."""
    return -(-len(raw) // PROMPT_BYTES_PER_TOKEN)


def prompt_bytes(prompt: str | Sequence[int]) -> bytes:
    """The bytes of a prompt given as text or as token ids. Raises ValueError for an unknown id."""
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return b"".join(map(token_bytes, prompt))


def render_chat(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """The chat template: one line with the role, one with the content. Parts that are not text appear as JSON."""
    lines = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] if _is_text(part) else orjson.dumps(part).decode() for part in content)
        extra = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
        suffix = orjson.dumps(extra, option=orjson.OPT_SORT_KEYS).decode() if extra else ""
        lines.append(f"<|{message.get('role')}|>\n{content or ''}{suffix}\n")
    return "".join(lines) + ("<|assistant|>\n" if add_generation_prompt else "")


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def content_of(model: str, raw: bytes) -> str:
    """The digest that stands for the KV cache of this prompt on this model."""
    return hashlib.blake2b(model.encode() + b"\x00" + raw, digest_size=16).hexdigest()


def freed_content(handoff_id: str) -> str:
    """What the blocks of a handoff hold after they were freed: something else, and never the same as a prompt's."""
    return hashlib.blake2b(b"freed\x00" + handoff_id.encode(), digest_size=16).hexdigest()


def natural_length(content: str) -> int:
    """Tokens after which a chat answer without a limit ends by itself: 24 to 55."""
    return 24 + int(content[:2], 16) % 32


def pieces(content: str, *, seed: int = 0, index: int = 0) -> Iterator[bytes]:
    """The endless token pieces of an answer."""
    carried: bytes | None = None
    for block in itertools.count():
        name = f"{content}|{seed}|{index}|{block}".encode()
        for pick in hashlib.blake2b(name, digest_size=64).digest():
            if carried is not None:
                yield carried
                carried = None
            elif pick < 256 // _SPLIT_EVERY:
                first, carried = SPLIT[pick % len(SPLIT)]
                yield first
            else:
                yield PIECES[pick % len(PIECES)]


def deltas(content: str, count: int, *, seed: int = 0, index: int = 0) -> Iterator[tuple[bytes, str]]:
    """Token pieces with the text each adds: none while a character is incomplete, U+FFFD if the answer ends in one."""
    held = b""
    for position, piece in enumerate(itertools.islice(pieces(content, seed=seed, index=index), count), start=1):
        held += piece
        try:
            text = held.decode()
            held = b""
        except UnicodeDecodeError:
            text = "�" if position == count else ""
        yield piece, text


def stopped(answer: Sequence[tuple[bytes, str]], stop: Sequence[str], min_tokens: int = 0) -> tuple[int, int] | None:
    """Where a stop string ends an answer: (tokens, characters of text), or None. The string is no part of the text."""
    text = ""
    for tokens, (_, delta) in enumerate(answer, start=1):
        text += delta
        if tokens > min_tokens:
            found = [at for at in (text.find(word) for word in stop) if at >= 0]
            if found:
                return tokens, min(found)
    return None


def expected_text(
    prompt: str | Sequence[int],
    max_tokens: int | None = None,
    *,
    model: str = MODEL,
    seed: int = 0,
    index: int = 0,
    stop: Sequence[str] = (),
) -> str:
    """The right answer of `/v1/completions` to a prompt (text or token ids) on any healthy simulated engine."""
    content = content_of(model, prompt_bytes(prompt))
    count = COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens
    return _whole(content, count, seed, index, stop)


def expected_chat_text(
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int | None = None,
    *,
    model: str = MODEL,
    seed: int = 0,
    index: int = 0,
    stop: Sequence[str] = (),
) -> str:
    """The right answer of `/v1/chat/completions` to messages on any healthy simulated engine."""
    content = content_of(model, prompt_bytes(render_chat(messages)))
    count = natural_length(content) if max_tokens is None else max_tokens
    return _whole(content, count, seed, index, stop)


def _whole(content: str, count: int, seed: int, index: int, stop: Sequence[str]) -> str:
    answer = list(deltas(content, count, seed=seed, index=index))
    end = stopped(answer, stop) if stop else None
    text = "".join(delta for _, delta in answer)
    return text if end is None else text[: end[1]]
