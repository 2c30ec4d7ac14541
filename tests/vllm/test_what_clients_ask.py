"""What clients may ask of an engine gives the same through Narwhal, in two legs, as from one engine alone."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from narwhal.connectors.vllm_nixl import ASK_FOR_HANDOFF
from scripts.real_engines.bench import CHAT, COMPLETIONS, MODEL
from scripts.real_engines.rawhttp import Exchange
from tests.vllm.stack import SENTENCE, Stack, messages, metric, post, prompt, status, streamed_text, text_of, wait_until

BLOCK = 32  # tokens; scripts/real_engines/engines.py starts them so
GREEDY = {"model": MODEL, "temperature": 0}
DRAWN = {"model": MODEL, "temperature": 1.0, "seed": 7}
# Several choices of a greedy draw are refused. As good as greedy, and without a seed: an engine on the CPU ends when a
# prompt of a request with a seed is computed in parts, as happens to long ones beside others.
SHARP = {"model": MODEL, "temperature": 1.0, "top_k": 1}


def chosen(answer: Exchange) -> Any:
    """The choices of a whole answer that was 200."""
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["choices"]


def texts_of(answer: Exchange) -> list[str]:
    """The texts of a completion's choices, in order."""
    return [choice["text"] for choice in sorted(chosen(answer), key=lambda choice: choice["index"])]


def events(answer: Exchange) -> list[Any]:
    """The events of a stream that ended well, without its marker."""
    streamed_text(answer)
    return [json.loads(event) for event in answer.events()[:-1]]


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_long_prompt(stack: Stack, stream: bool) -> None:
    """As long as the engines take: some sixty KV blocks."""
    long = f"long {stream}: {SENTENCE * 200}"
    tokens = json.loads(post(stack.prefill.url, "/tokenize", {"model": MODEL, "prompt": long}).body)["tokens"]
    body = {**GREEDY, "prompt": tokens[: 2048 - 24], "max_tokens": 20, "ignore_eos": True}
    before = stack.transfers()
    answer = post(stack.url, COMPLETIONS, {**body, "stream": stream})
    assert (streamed_text(answer) if stream else text_of(answer)) == stack.alone(COMPLETIONS, body)
    assert stack.transfers() == before + 1


@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_a_prompt_that_ends_about_the_end_of_a_block(stack: Stack, tokens: int) -> None:
    body = {**GREEDY, "prompt": [(7 * number + tokens) % 200 + 3 for number in range(tokens)], "max_tokens": 8}
    assert text_of(post(stack.url, COMPLETIONS, body)) == stack.alone(COMPLETIONS, body)


def test_many_at_once_get_each_their_own(stack: Stack) -> None:
    """Streams and whole answers, long and short prompts, in flight together: nobody reads another's KV."""

    def body(number: int) -> dict[str, Any]:
        return {**GREEDY, "prompt": f"{number} at once: {SENTENCE * (1 + number % 7)}", "max_tokens": 6 + number % 11}

    def ask(number: int) -> str:
        stream = number % 2 == 0
        answer = post(stack.url, COMPLETIONS, {**body(number), "stream": stream})
        return streamed_text(answer) if stream else text_of(answer)

    numbers = range(24)
    before = stack.transfers()
    with ThreadPoolExecutor(12) as clients:
        got = list(clients.map(ask, numbers))
    assert stack.transfers() == before + 24
    assert got == [stack.alone(COMPLETIONS, body(number)) for number in numbers]
    assert metric(stack.prefill.url, "vllm:nixl_num_kv_expired_reqs_total") == 0


def test_one_prompt_asked_by_many_at_once(stack: Stack) -> None:
    body = {**GREEDY, "prompt": prompt("the same"), "max_tokens": 12}
    with ThreadPoolExecutor(8) as clients:
        got = list(clients.map(lambda _: text_of(post(stack.url, COMPLETIONS, body)), range(8)))
    assert set(got) == {stack.alone(COMPLETIONS, body)}


# --- what an answer may be asked to hold ------------------------------------------------------------------------------


def near(one: list[float], other: list[float]) -> bool:
    """Log probabilities of one model and one prompt, by two ways of computing them."""
    return len(one) == len(other) and all(abs(a - b) < 1e-3 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_of_a_completion(stack: Stack, stream: bool) -> None:
    body = {**GREEDY, "prompt": prompt(f"logprobs {stream}"), "max_tokens": 6, "logprobs": 3, "ignore_eos": True}
    alone = chosen(post(stack.prefill.url, COMPLETIONS, body))[0]["logprobs"]
    answer = post(stack.url, COMPLETIONS, {**body, "stream": stream})
    parts = [e["choices"][0]["logprobs"] for e in events(answer)] if stream else [chosen(answer)[0]["logprobs"]]
    got = {key: [value for part in parts for value in part[key]] for key in ("tokens", "token_logprobs")}
    assert got["tokens"] == alone["tokens"]
    assert near(got["token_logprobs"], alone["token_logprobs"])
    # By their texts, of which several tokens may have the same.
    assert all(top for part in parts for top in part["top_logprobs"])


def test_logprobs_of_a_chat(stack: Stack) -> None:
    body = {
        **GREEDY,
        "messages": messages("logprobs"),
        "max_completion_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
    }
    alone, got = (chosen(post(url, CHAT, body))[0]["logprobs"]["content"] for url in (stack.prefill.url, stack.url))
    assert [each["token"] for each in got] == [each["token"] for each in alone]
    assert near([each["logprob"] for each in got], [each["logprob"] for each in alone])
    assert all(len(each["top_logprobs"]) == 2 for each in got)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_several_choices_of_one_prompt(stack: Stack, stream: bool) -> None:
    """The decode engine reads the handoff once, and finds its KV for each choice in its own cache."""
    body = {**DRAWN, "prompt": prompt(f"choices {stream}"), "max_tokens": 16, "n": 3}
    alone = texts_of(post(stack.prefill.url, COMPLETIONS, body))
    answer = post(stack.url, COMPLETIONS, {**body, "stream": stream})
    if stream:
        texts = ["", "", ""]
        for event in events(answer):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        texts = texts_of(answer)
    assert texts == alone
    assert len(set(alone)) == 3


def test_several_choices_beside_other_requests(stack: Stack) -> None:
    """Each choice is of its own prompt, though others want blocks meanwhile (with few: test_short_of_room.py)."""

    def body(number: int) -> dict[str, Any]:
        return {**SHARP, "prompt": f"{number} of several: {SENTENCE * 12}", "max_tokens": 10, "n": 4}

    def ask(number: int) -> set[str]:
        return set(texts_of(post(stack.url, COMPLETIONS, body(number))))

    with ThreadPoolExecutor(8) as clients:
        got = list(clients.map(ask, range(8)))
    assert got == [{stack.alone(COMPLETIONS, {**body(number), "n": 1})} for number in range(8)]
    assert metric(stack.decode.url, "vllm:nixl_num_failed_transfers_total") == 0


def test_several_choices_leave_no_kv_behind(stack: Stack) -> None:
    """What nobody reads stays pinned on the producer until its lease ends."""

    def pinned() -> float:
        return metric(stack.prefill.url, "vllm:kv_cache_usage_perc")

    wait_until(lambda: pinned() == 0, "the producer holds nothing", 60)
    texts_of(
        post(stack.url, COMPLETIONS, {**SHARP, "prompt": f"left behind: {SENTENCE * 12}", "max_tokens": 4, "n": 4})
    )
    wait_until(lambda: pinned() == 0, "the producer holds nothing of it, long before its lease ends", 10)


def test_a_number_of_choices_as_text_is_a_number(stack: Stack) -> None:
    """Engines take it for one."""
    body = {**SHARP, "prompt": f"as text: {SENTENCE * 12}", "max_tokens": 8, "n": "3"}
    before = stack.transfers()
    got = texts_of(post(stack.url, COMPLETIONS, body))
    assert got == [stack.alone(COMPLETIONS, {**body, "n": 1})] * 3
    assert stack.transfers() == before + 1


def test_a_beam_search_is_refused_because_engines_hand_over_no_kv_of_it(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": prompt("beams"), "max_tokens": 1, "n": 2, "use_beam_search": True}
    alone = post(stack.prefill.url, COMPLETIONS, {**body, "kv_transfer_params": ASK_FOR_HANDOFF})
    assert len(chosen(alone)) == 2
    assert json.loads(alone.body)["kv_transfer_params"] is None
    refused = post(stack.url, COMPLETIONS, body)
    assert (refused.status, json.loads(refused.body)["error"]["param"]) == (400, "use_beam_search")
    assert all(not stack.seen(name)["streaks"] for name in stack.engines)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("included", [False, True], ids=["left out", "included"])
def test_a_stop_string(stack: Stack, stream: bool, included: bool) -> None:
    body = {**GREEDY, "prompt": prompt(f"stop {stream} {included}"), "max_tokens": 40, "ignore_eos": True}
    stop = stack.alone(COMPLETIONS, body)[8:11]
    body |= {"stop": [stop], "include_stop_str_in_output": included}
    alone = chosen(post(stack.prefill.url, COMPLETIONS, body))[0]
    assert alone["finish_reason"] == "stop"
    answer = post(stack.url, COMPLETIONS, {**body, "stream": stream})
    if stream:
        last = [event["choices"][0] for event in events(answer) if event["choices"]][-1]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        assert streamed_text(answer) == alone["text"]
    else:
        got = chosen(answer)[0]
        assert (got["text"], got["finish_reason"], got["stop_reason"]) == (alone["text"], "stop", stop)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids(stack: Stack, path: str) -> None:
    asked: dict[str, Any] = {"messages": messages("ids")} if path == CHAT else {"prompt": prompt("ids")}
    body = {**GREEDY, **asked, "max_tokens": 7, "return_token_ids": True}
    alone, got = (json.loads(post(url, path, body).body) for url in (stack.prefill.url, stack.url))

    def ids(whole: dict[str, Any]) -> tuple[Any, Any]:
        choice = whole["choices"][0]
        return choice["token_ids"], whole.get("prompt_token_ids") or choice.get("prompt_token_ids")

    assert ids(got) == ids(alone)
    assert all(ids(got))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_counts_the_prompt_once_and_no_token_of_the_prefill_leg(stack: Stack, path: str) -> None:
    asked: dict[str, Any] = {"messages": messages("usage")} if path == CHAT else {"prompt": prompt("counted")}
    body = {**GREEDY, **asked, "max_tokens": 9, "ignore_eos": True}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    alone = json.loads(post(stack.prefill.url, path, body).body)["usage"]
    whole = json.loads(post(stack.url, path, body).body)["usage"]
    stream = events(post(stack.url, path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    expected = {name: alone[name] for name in counts}
    assert expected["completion_tokens"] == 9
    assert {name: whole[name] for name in counts} == expected
    assert stream[-1]["choices"] == []
    assert {name: stream[-1]["usage"][name] for name in counts} == expected


def test_usage_in_every_event(stack: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**GREEDY, "prompt": prompt("continuous"), "max_tokens": 5, "ignore_eos": True}
    got = events(post(stack.url, COMPLETIONS, {**body, "stream": True, "stream_options": options}))
    counted = [event["usage"]["completion_tokens"] for event in got]
    assert counted == sorted(counted)
    assert counted[-1] == 5


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seeded_draw_is_the_same_draw(stack: Stack, seed: int) -> None:
    body = {"model": MODEL, "prompt": prompt("seeded"), "max_tokens": 12, "temperature": 1.5, "seed": seed}
    assert text_of(post(stack.url, COMPLETIONS, body)) == stack.alone(COMPLETIONS, body)


# --- what Narwhal does not know ---------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "ice",
        "description": "How thick is the ice?",
        "parameters": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}},
            "required": ["deep"],
            "additionalProperties": False,
        },
    },
}


def test_tools_reach_both_engines(stack: Stack) -> None:
    """The template puts them into the prompt: were they lost on one leg, the prompts would differ."""
    bare = {**GREEDY, "messages": messages("tools"), "max_tokens": 12}
    body = {**bare, "tools": [WEATHER], "tool_choice": "auto"}
    alone, got, without = (
        json.loads(post(url, CHAT, asked).body)
        for url, asked in ((stack.prefill.url, body), (stack.url, body), (stack.url, bare))
    )
    assert got["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]
    assert got["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_that_must_be_called(stack: Stack, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "ice"}}
    body = {
        **GREEDY,
        "messages": messages(f"call {stream}"),
        "max_tokens": 60,
        "tools": [WEATHER],
        "tool_choice": choice,
    }
    alone = chosen(post(stack.prefill.url, CHAT, body))[0]["message"]["tool_calls"][0]["function"]
    assert alone["name"] == "ice"
    answer = post(stack.url, CHAT, {**body, "stream": stream})
    if not stream:
        assert chosen(answer)[0]["message"]["tool_calls"][0]["function"] == alone
        return
    calls = [
        call["function"]
        for event in events(answer)
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls") or []
    ]
    assert "".join(call.get("name") or "" for call in calls) == "ice"
    assert "".join(call.get("arguments") or "" for call in calls) == alone["arguments"]


def test_an_answer_of_a_given_form(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
    form = {"type": "json_schema", "json_schema": {"name": "ice", "schema": schema}}
    body = {**GREEDY, "messages": messages("form"), "max_tokens": 60, "response_format": form}
    assert text_of(post(stack.url, CHAT, body)) == stack.alone(CHAT, body)


# --- what engines refuse ----------------------------------------------------------------------------------------------


@pytest.mark.case("D4")
@pytest.mark.rule("F4")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, {"temperature": -1}),
        (COMPLETIONS, {"top_p": 7}),
        (COMPLETIONS, {"max_tokens": -3}),
        (COMPLETIONS, {"max_tokens": 5000}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"stop": 5}),
        (COMPLETIONS, {"logprobs": 9999}),
        (CHAT, {"messages": "none"}),
        (CHAT, {"tools": [{"type": "function"}]}),
        (COMPLETIONS, {"n": 2}),  # of a greedy draw
        (CHAT, {"messages": [{"role": "user", "content": SENTENCE * 400}]}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_refusal_is_the_engines_own_and_nobodys_fault(
    stack: Stack, path: str, asked: dict[str, Any], stream: bool
) -> None:
    base: dict[str, Any] = {"messages": messages("refused")} if path == CHAT else {"prompt": prompt("refused")}
    body = {**GREEDY, "max_tokens": 4, **base, **asked, "stream": stream}
    # Asked for a whole answer: what an engine notices late it says inside of a stream, after a 200. The prefill leg is
    # never a stream, and meets it first.
    alone, got = post(stack.prefill.url, path, {**body, "stream": False}), post(stack.url, path, body)
    assert alone.status == 400, alone.body
    assert (got.status, json.loads(got.body)) == (400, json.loads(alone.body))
    assert all(not stack.seen(name)["streaks"] for name in stack.engines)
    assert status(stack.url, "/ready") == 200
