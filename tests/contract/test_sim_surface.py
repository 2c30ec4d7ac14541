"""The simulated engine's HTTP surface, as the engine protocol has it."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from narwhal.sim.testing import sim_engine
from narwhal.sim.text import MODEL, detokenize, expected_chat_text, expected_text, tokenize
from tests.sim.legs import CHAT, COMPLETIONS, LONG, chat, prompt
from tests.sim.raw import Connection, ask

TIMES: dict[str, Any] = {"tpot_ms": 1.0, "prefill_base_ms": 1.0}


async def test_health_and_identity() -> None:
    async with sim_engine(version="0.32.0", max_model_len=2048, **TIMES) as engine:
        health = await ask(engine.url, "GET", "/health")
        assert (health.status, health.body, health.headers["content-length"]) == (200, b"", "0")
        head = await ask(engine.url, "HEAD", "/health")
        assert (head.status, head.headers["allow"]) == (405, "GET")
        assert (await ask(engine.url, "GET", "/version")).json == {"version": "0.32.0"}
        (model,) = (await ask(engine.url, "GET", "/v1/models")).json["data"]
        assert (model["id"], model["max_model_len"]) == (MODEL, 2048)


async def test_metrics_name_the_process_and_the_transfers() -> None:
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "GET", "/metrics")
        lines = answer.body.decode().splitlines()
        values = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
        assert values.pop("process_start_time_seconds") == engine.state()["start_time"]
        assert values == {
            "vllm:num_requests_running": 0.0,
            "vllm:num_requests_waiting": 0.0,
            "vllm:nixl_num_failed_transfers_total": 0.0,
            "vllm:nixl_num_kv_expired_reqs_total": 0.0,
        }
        assert f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0' in lines


async def test_tokenize_in_both_forms() -> None:
    async with sim_engine(**TIMES) as engine:
        whole = await ask(engine.url, "POST", "/tokenize", {"model": MODEL, "prompt": LONG})
        assert whole.json["tokens"] == tokenize(LONG)
        assert whole.json["count"] == len(tokenize(LONG))
        assert whole.json["max_model_len"] == 32768
        body = {"model": MODEL, "messages": chat()["messages"], "add_generation_prompt": True}
        said = await ask(engine.url, "POST", "/tokenize", body)
        assert LONG in detokenize(said.json["tokens"])
        completion = await ask(engine.url, "POST", CHAT, chat())
        assert completion.json["usage"]["prompt_tokens"] == said.json["count"]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_says_what_is_expected(stream: bool) -> None:
    async with sim_engine(**TIMES) as engine:
        body = prompt(model=MODEL, max_tokens=90, stream=stream)
        answer = await ask(engine.url, "POST", COMPLETIONS, body, headers={"X-Request-Id": "abc"})
        assert (answer.status, answer.end) == (200, "complete")
        assert answer.text == expected_text(LONG, 90)
        ids = {event["id"] for event in answer.events if event != "[DONE]"} if stream else {answer.json["id"]}
        assert ids == {"cmpl-abc"}


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_says_what_is_expected(stream: bool) -> None:
    async with sim_engine(**TIMES) as engine:
        body = chat(stream=stream, seed=3)
        answer = await ask(engine.url, "POST", CHAT, body, headers={"X-Request-Id": "abc"})
        assert answer.text == expected_chat_text(body["messages"], 12, seed=3)
        ids = {event["id"] for event in answer.events if event != "[DONE]"} if stream else {answer.json["id"]}
        assert ids == {"chatcmpl-abc"}


async def test_a_stream_ends_with_finish_reason_usage_and_marker() -> None:
    async with sim_engine(**TIMES) as engine:
        body = prompt(stream=True, stream_options={"include_usage": True})
        answer = await ask(engine.url, "POST", COMPLETIONS, body)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["transfer-encoding"] == "chunked"
        *tokens, usage, marker = answer.events
        assert marker == "[DONE]"
        assert usage["choices"] == []
        count = len(tokenize(LONG))
        assert usage["usage"] == {"prompt_tokens": count, "completion_tokens": 12, "total_tokens": count + 12}
        assert [event["choices"][0]["finish_reason"] for event in tokens] == [None] * 11 + ["length"]


async def test_a_chat_stream_begins_with_the_role_and_no_content() -> None:
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "POST", CHAT, chat(stream=True))
        first, second, *_ = answer.events
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert set(second["choices"][0]["delta"]) == {"content"}


async def test_events_may_have_no_text_or_several_tokens() -> None:
    async with sim_engine(tokens_per_step=4, seed=1, **TIMES) as engine:
        body = prompt(max_tokens=200, stream=True, return_token_ids=True)
        answer = await ask(engine.url, "POST", COMPLETIONS, body)
        choices = [event["choices"][0] for event in answer.events if event != "[DONE]"]
        sizes = [len(choice["token_ids"]) for choice in choices]
        assert sizes[0] == 1
        assert set(sizes) == {1, 2, 3, 4}
        assert sum(sizes) == 200
        assert answer.text == expected_text(LONG, 200)
        assert detokenize([token for choice in choices for token in choice["token_ids"]]) == expected_text(LONG, 200)
        single = await ask(engine.url, "POST", COMPLETIONS, prompt(max_tokens=200, n=1, stream=True, seed=0))
        assert single.text == answer.text


async def test_several_choices_and_prompts_have_texts_of_their_own() -> None:
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "POST", COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 8})
        texts = [choice["text"] for choice in answer.json["choices"]]
        assert texts == [expected_text(word, 8, index=at) for word in "ab" for at in (0, 1)]
        stream = await ask(engine.url, "POST", COMPLETIONS, prompt(n=2, stream=True))
        said = {0: "", 1: ""}
        for event in stream.events[:-1]:
            said[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert said == {at: expected_text(LONG, 12, index=at) for at in (0, 1)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer(stream: bool) -> None:
    whole = expected_text(LONG, 60)
    word = whole[25:28]
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "POST", COMPLETIONS, prompt(max_tokens=60, stop=[word], stream=stream))
        assert answer.text == whole[: whole.index(word)]
        last = answer.events[-2]["choices"][0] if stream else answer.json["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", word)
        later = await ask(engine.url, "POST", COMPLETIONS, prompt(max_tokens=60, min_tokens=60, stop=[word]))
        assert later.json["usage"]["completion_tokens"] == 60


async def test_lengths_without_a_limit_and_echo_ignored() -> None:
    async with sim_engine(**TIMES) as engine:
        completion = await ask(engine.url, "POST", COMPLETIONS, {"prompt": "a", "echo": True})
        assert completion.text == expected_text("a")
        assert completion.json["choices"][0]["finish_reason"] == "length"
        messages = chat()["messages"]
        said = await ask(engine.url, "POST", CHAT, {"messages": messages})
        assert said.text == expected_chat_text(messages)
        assert said.json["choices"][0]["finish_reason"] == "stop"
        short = await ask(engine.url, "POST", CHAT, {"messages": messages, "max_tokens": 9, "max_completion_tokens": 2})
        assert short.json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("body", [prompt(logprobs=2), chat(logprobs=True, top_logprobs=2)])
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_cover_every_token(body: dict[str, Any], stream: bool) -> None:
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "POST", CHAT if "messages" in body else COMPLETIONS, {**body, "stream": stream})
        events = answer.events[:-1] if stream else [answer.json]
        found = [event["choices"][0]["logprobs"] for event in events]
        listed = [entry for part in found if part for entry in part.get("content") or part.get("tokens")]
        assert len(listed) == 12


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": 7}, 400, "body.prompt"),
        (COMPLETIONS, {"prompt": [7, -1]}, 400, "prompt"),
        (CHAT, {}, 400, "body.messages"),
        (CHAT, {"messages": ["hello"]}, 400, "body.messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, 400, "body.messages.0.content"),
        (COMPLETIONS, prompt(max_tokens=0), 400, "max_tokens"),
        (COMPLETIONS, prompt(max_tokens="many"), 400, "body.max_tokens"),
        (COMPLETIONS, prompt(max_tokens=5000), 400, "max_tokens"),
        (COMPLETIONS, prompt(max_tokens=2000), 400, "input_tokens"),
        (COMPLETIONS, prompt("x" * 9000), 400, "input_tokens"),
        (COMPLETIONS, prompt(n=0), 400, None),
        (COMPLETIONS, prompt(min_tokens=13), 400, None),
        (COMPLETIONS, prompt(temperature=-1), 400, "temperature"),
        (COMPLETIONS, prompt(top_p=1.5), 400, "top_p"),
        (COMPLETIONS, prompt(stream="yes"), 400, "body.stream"),
        (COMPLETIONS, prompt(stop=[1]), 400, "body.stop"),
        (COMPLETIONS, prompt(stream_options={"include_usage": True}), 400, "stream_options"),
        (COMPLETIONS, prompt(stream_options=[1], stream=True), 400, "body.stream_options"),
        (COMPLETIONS, prompt(kv_transfer_params="garbage"), 400, "body.kv_transfer_params"),
        (COMPLETIONS, prompt(kv_transfer_params=[1]), 400, "body.kv_transfer_params"),
        (COMPLETIONS, b'{"prompt": ', 400, "body.11"),
        (COMPLETIONS, [1, 2], 400, "body"),
        (COMPLETIONS, b'{"prompt": "\xff"}', 400, None),
    ],
)
async def test_bad_requests_in_the_engines_words(path: str, body: Any, status: int, param: str | None) -> None:
    async with sim_engine(max_model_len=2048, **TIMES) as engine:
        answer = await ask(engine.url, "POST", path, body)
        error = answer.json["error"]
        assert (answer.status, error["code"], error["param"]) == (status, status, param)
        assert isinstance(error["message"], str)
        assert (await ask(engine.url, "GET", "/health")).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "detail"),
    [("GET", "/nothing", 404, "Not Found"), ("GET", COMPLETIONS, 405, "Method Not Allowed")],
)
async def test_unknown_routes(method: str, path: str, status: int, detail: str) -> None:
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, method, path)
        assert (answer.status, answer.json) == (status, {"detail": detail})


async def test_numbers_beyond_the_standard_are_read_as_python_reads_them() -> None:
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 2, "extra": NaN}')
        assert answer.status == 200


async def test_a_credential_is_wanted_where_one_is_configured() -> None:
    async with sim_engine(api_key="secret", **TIMES) as engine:
        assert (await ask(engine.url, "GET", "/v1/models")).status == 401
        right = {"Authorization": "Bearer secret"}
        assert (await ask(engine.url, "POST", COMPLETIONS, prompt(), headers=right)).status == 200
        assert (
            await ask(engine.url, "POST", COMPLETIONS, prompt(), headers={"Authorization": "Bearer x"})
        ).status == 401
        assert (await ask(engine.url, "GET", "/health")).status == 200


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with sim_engine(**TIMES) as engine:
        connection = await Connection.to(engine.url)
        connection.send("POST", COMPLETIONS, prompt(max_tokens=3))
        connection.send("GET", "/version")
        raw = b""
        while raw.count(b"HTTP/1.1 200 OK") < 2 or not raw.endswith(b"}"):
            raw += await connection.reader.read(65536)
        assert raw.index(b"text_completion") < raw.index(b'{"version"')
        await connection.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_and_counted(raw: bytes) -> None:
    async with sim_engine(**TIMES) as engine:
        connection = await Connection.to(engine.url)
        connection.writer.write(raw)
        answer = await connection.receive()
        assert answer.status == 400
        assert await connection.closed() == "closed"
        await connection.close()
        assert engine.state()["bad_requests"] == 1
        assert engine.requests() == []


async def test_a_chunked_body_with_expect_and_close() -> None:
    async with sim_engine(**TIMES) as engine:
        connection = await Connection.to(engine.url)
        body = json.dumps(prompt(max_tokens=2)).encode()
        top = "POST /v1/completions HTTP/1.1\r\nhost: e\r\nexpect: 100-continue\r\nconnection: close\r\n"
        connection.writer.write(top.encode() + b"transfer-encoding: chunked\r\n\r\n")
        assert (await connection.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        for at in range(0, len(body), 7):
            part = body[at : at + 7]
            connection.writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        connection.writer.write(b"0\r\n\r\n")
        answer = await connection.receive()
        assert (answer.status, answer.text) == (200, expected_text(LONG, 2))
        assert await connection.closed() == "closed"
        await connection.close()


async def test_the_official_client_reads_both_routes() -> None:
    async with sim_engine(**TIMES) as engine, AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
        messages: Any = chat()["messages"]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, stream=True)
        said = "".join([part.choices[0].delta.content or "" async for part in stream])
        assert said == expected_chat_text(messages, 20)
        whole = await client.completions.create(model=MODEL, prompt=LONG, max_tokens=20)
        assert whole.choices[0].text == expected_text(LONG, 20)


async def test_requests_are_recorded_with_how_they_ended() -> None:
    async with sim_engine(tpot_ms=20.0) as engine:
        await ask(engine.url, "POST", COMPLETIONS, prompt(max_tokens=2), headers={"X-Request-Id": "r-1", "Cookie": "c"})
        body = prompt(max_tokens=1000, stream=True)
        await ask(engine.url, "POST", COMPLETIONS, body, enough=lambda answer: len(answer.events) >= 2)
        gone = await engine.wait_for(lambda e: [r for r in e.requests() if r["outcome"] == "disconnected"])
        answered = engine.requests()[0]
        assert (answered["outcome"], answered["status"], answered["tokens"]) == ("answered", 200, 2)
        assert (answered["request_id"], answered["headers"]["cookie"], answered["phase"]) == ("r-1", "c", "local")
        assert gone[0]["tokens"] >= 2
        assert engine.state()["in_flight"] == 0
        seen = await ask(engine.url, "GET", f"/sim/requests?after={answered['number']}")
        assert [record["outcome"] for record in seen.json] == ["disconnected"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_is_noticed_late_is_said_inside_of_a_stream(path: str) -> None:
    asked = {"logprobs": True, "top_logprobs": 99} if path == CHAT else {"logprobs": 99}
    body = (chat if path == CHAT else prompt)(LONG, **asked)
    async with sim_engine(**TIMES) as engine:
        whole = await ask(engine.url, "POST", path, body)
        assert (whole.status, whole.json["error"]["param"]) == (400, "logprobs")
        stream = await ask(engine.url, "POST", path, {**body, "stream": True})
        assert (stream.status, stream.end) == (200, "complete")
        error, marker = stream.events
        assert (error["error"], marker) == (whole.json["error"], "[DONE]")
        # And nothing of it stays: the engine serves on.
        assert (await ask(engine.url, "POST", path, (chat if path == CHAT else prompt)(LONG))).status == 200


async def test_several_choices_of_a_greedy_draw_are_refused() -> None:
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "POST", COMPLETIONS, prompt(n=2, temperature=0))
        assert (answer.status, answer.json["error"]["message"]) == (
            400,
            "n must be 1 when using greedy sampling, got 2.",
        )
        assert (await ask(engine.url, "POST", COMPLETIONS, prompt(n=2, temperature=1))).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [16_385, 1_000_000_000])
async def test_more_choices_than_an_engine_makes_are_refused(path: str, n: int) -> None:
    body = (chat if path == CHAT else prompt)(n=n, temperature=1)
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "POST", path, body)
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith(f"n must be at most 16384, got {n}.")
