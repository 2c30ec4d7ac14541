"""The answers of the OpenAI routes as vLLM writes them: choices, usage, and bodies that are not streamed."""

import functools
import hashlib
import itertools
from collections.abc import Iterator

from narwhal.sim import text
from narwhal.sim.openai_api import Ask, Json

Tokens = list[tuple[bytes, str]]
_EOS_LOGPROB = -9999.0  # what vLLM gives for a token that cannot come


@functools.cache
def fingerprint(version: str, model: str) -> str:
    """The system fingerprint."""
    return f"vllm-{version}-{hashlib.blake2b(model.encode(), digest_size=4).hexdigest()}"


def choices(ask: Ask, contents: tuple[str, ...]) -> Iterator[tuple[int, bytes, str]]:
    """Every choice's index, prompt and content; `contents` has one for each choice."""
    for index, content in enumerate(contents):
        yield index, ask.prompts[index // ask.n], content


def tokens_of(ask: Ask, content: str, index: int) -> tuple[Iterator[tuple[bytes, str]], str, str | None]:
    """One choice: its tokens with the text each adds, the finish reason, and the stop string that ended it."""
    spoken = text.deltas(content, ask.limit(content), seed=ask.seed, index=index % ask.n)
    if not ask.stop:
        return spoken, ask.finish, None
    whole = list(spoken)
    end = text.stopped(whole, ask.stop, ask.min_tokens)
    if end is None:
        return iter(whole), ask.finish, None
    used, limit = end
    said = "".join(delta for _, delta in whole)
    word = next(word for word in ask.stop if said.startswith(word, limit))
    return _held_back(whole[:used], limit, max(map(len, ask.stop)) - 1), "stop", word


def _held_back(spoken: Tokens, limit: int, hold: int) -> Iterator[tuple[bytes, str]]:
    """Text up to `limit`; what may yet be the beginning of a stop string is kept back until it is known."""
    said = "".join(delta for _, delta in spoken)
    sent = seen = 0
    for at, (piece, delta) in enumerate(spoken, start=1):
        seen += len(delta)
        upto = limit if at == len(spoken) else max(sent, min(limit, seen - hold))
        yield piece, said[sent:upto]
        sent = upto


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """The usage object of a stream."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def logprobs_of(ask: Ask, tokens: Tokens, offset: int = 0) -> Json | None:
    """Log probabilities in the route's shape: every token was certain. `offset` counts the characters said before."""
    if ask.logprobs is None:
        return None
    if ask.chat:
        return {"content": [_chat_logprob(piece, said, ask.logprobs) for piece, said in tokens]}
    offsets = itertools.accumulate((len(said) for _, said in tokens), initial=offset)
    others = [f"<{at}>" for at in range(1, ask.logprobs)]
    return {
        "text_offset": list(offsets)[:-1],
        "token_logprobs": [0.0] * len(tokens),
        "tokens": [said for _, said in tokens],
        "top_logprobs": [{said: 0.0, **dict.fromkeys(others, _EOS_LOGPROB)} for _, said in tokens],
    }


def _chat_logprob(piece: bytes, said: str, alternatives: int) -> Json:
    token: Json = {"token": said, "logprob": 0.0, "bytes": list(piece)}
    other = {"token": "", "logprob": _EOS_LOGPROB, "bytes": []}
    return {**token, "top_logprobs": [token, *[other] * (alternatives - 1)][:alternatives]}


def answer(ask: Ask, ident: str, created: int, contents: tuple[str, ...], mark: str) -> tuple[Json, int]:
    """The body of an answer that is not streamed, with no handoff in it, and the number of its tokens."""
    listed: list[Json] = []
    total = 0
    for index, raw, content in choices(ask, contents):
        spoken, finish, stop_reason = tokens_of(ask, content, index)
        tokens = list(spoken)
        total += len(tokens)
        listed.append(_choice(ask, index, raw, tokens) | {"finish_reason": finish, "stop_reason": stop_reason})
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    prompt_ids = text.token_ids(ask.prompts[0]) if ask.return_token_ids else None
    in_chat: Json = {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None} if ask.chat else {}
    body: Json = {
        "id": ident,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": created,
        "model": ask.model,
        "choices": listed,
        "service_tier": None,
        "system_fingerprint": mark,
        "usage": usage(sum(map(text.count_tokens, ask.prompts)), total) | details,
        **in_chat,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return body, total


def aborted_answer(body: Json) -> Json:
    """What an engine that ends sends in place of this body: half of each text, and the finish reason `abort`."""
    listed = []
    for choice in body["choices"]:
        cut = {**choice, "finish_reason": "abort", "stop_reason": None}
        if "message" in cut:
            said = cut["message"]["content"]
            cut["message"] = {**cut["message"], "content": said[: len(said) // 2]}
        else:
            cut["text"] = cut["text"][: len(cut["text"]) // 2]
        listed.append(cut)
    counted = body["usage"]
    half = usage(counted["prompt_tokens"], counted["completion_tokens"] // 2)
    return {**body, "choices": listed, "usage": {**counted, **half}}


def _choice(ask: Ask, index: int, raw: bytes, tokens: Tokens) -> Json:
    said = "".join(delta for _, delta in tokens)
    ids = [text.token_id(piece) for piece, _ in tokens] if ask.return_token_ids else None
    if ask.chat:
        message = {"role": "assistant", "content": said, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, "reasoning": None}
        said_part: Json = {"index": index, "message": message}
    else:
        said_part = {"index": index, "text": said}
    choice = {
        **said_part,
        "logprobs": logprobs_of(ask, tokens),
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": ids,
    }
    if not ask.chat:
        choice |= {"prompt_logprobs": None, "prompt_token_ids": text.token_ids(raw) if ask.return_token_ids else None}
    return choice | {"routed_experts": None}
