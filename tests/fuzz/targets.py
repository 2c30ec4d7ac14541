"""What is searched for faults: a property of bytes, some bytes to begin with, and words that such bytes are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import orjson

from narwhal import wire
from narwhal._pb import placement_pb2
from narwhal.config import ProxySettings
from narwhal.control.core.history import Epoch, History, to_document
from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.placement import EngineEntry, Placement
from narwhal.reports import Batch, LegFailure, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import Outcome, Phase
from tests.fuzz import clients, engines, files, peers
from tests.proxy.harness import (
    DONE,
    HANDOFF,
    LAST,
    STREAM_HEAD,
    answer,
    chunk,
    prefill_answer,
    request_bytes,
    token,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ERROR = b'data: {"error": {"message": "no", "type": "E", "param": null, "code": 500}}\n\n'
ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
ABORT = b'data: {"choices": [{"text": "", "finish_reason": "abort"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
BODY = {"model": "sim-model", "prompt": "a narwhal", "max_tokens": 3}
CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "a"}], "stream": True, "n": 2}
CUTS = (b"\0\0\0", b"\1\2\1", b"ab\2", b"xy\3")  # ways to cut what follows
IN_JSON = (b'"kv_transfer_params"', b"\\u0073", b"1e99", b"-0", b"null", b"[[", b"}}", b"9" * 30)
DEPTHS = (200, 300, 1200)  # of lists in each other: what a JSON library reads it may not write
IN_HTTP = (
    *(b"\r\n", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.0 204 No\r\n"),
    *(b"Content-Length: 0\r\n", b"content-length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    *(b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"X-Request-Id: a\r\n", b"5;a=b\r\n"),
)
IN_STREAMS = (b"data: ", b"data:", b"\n\n", b"\r\n\r\n", b"[DONE]", b'"error"', b'"abort"', b'"role"', b": ping", b"\r")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of hostile bytes."""

    holds: Callable[[bytes], None]  # raises where the property does not hold
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()
    json: bool = False  # such bytes are JSON, in lines or between NUL bytes


def _deep(whole: bytes, place: bytes) -> list[bytes]:
    """The same, and with many lists in the place of something."""
    return [whole, *(whole.replace(place, b"[" * depth + b"]" * depth) for depth in DEPTHS)]


def _nested(whole: bytes) -> list[bytes]:
    """An object, and the same with one member more, of many lists."""
    at = whole.rindex(b"}")
    return [whole, *(more for more in _deep(whole[:at] + b',"x":@' + whole[at:], b"@") if b"@" not in more)]


def _cut(*bodies: bytes) -> list[bytes]:
    return [how + body for body in bodies for how in CUTS]


def _streams() -> list[bytes]:
    whole = [token(), token("b"), USAGE, DONE]
    return [
        b"".join(whole),
        b"".join([ROLE, *whole]),
        token() + ERROR + DONE,
        token() + ABORT + DONE,
        b": ping\n\n" + token() + b"data: [DONE]",
        b"event: x\r\ndata: {}\r\n\r\n" + DONE,
    ]


def _answers() -> list[bytes]:
    streams = [STREAM_HEAD + b"".join(map(chunk, events.splitlines(keepends=True))) + LAST for events in _streams()]
    plain = [prefill_answer(), answer(b'{"error": {"message": "no"}}', status="500 Internal Server Error")]
    ended = [b"HTTP/1.1 200 OK\r\n\r\n" + token() + DONE, b"HTTP/1.1 100 Continue\r\n\r\n" + prefill_answer()]
    return [*streams, *plain, *ended]


def _requests() -> list[bytes]:
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    expecting = b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n{}"
    upgrade = b"GET / HTTP/1.1\r\nHost: t\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    return [request_bytes(BODY) * 2, chunked * 2, expecting, upgrade, b"GET / HTTP/1.0\r\n\r\n"]


def _reports() -> list[bytes]:
    failure = LegFailure(outcome=Outcome.STREAM_CUT, producer="p1", producer_incarnation=1, detail="cut", elapsed_s=0.5)
    cut = Run(engine="d1", phase=Phase.DECODE, incarnation=1, outcome=Outcome.STREAM_CUT, failure=failure)
    done = Run(engine="p1", phase=Phase.PREFILL, incarnation=1, outcome=Outcome.HANDOFF, count=3)
    first = Sketch()
    first.add(0.2)
    batch = Batch(
        proxy=ProxyKey(id="edge", slot=0, boot=1),
        sequence=1,
        runs=(done, cut),
        requests=RequestCounts(served=2, failed=1),
        measures=(LegMeasures(engine="p1", phase=Phase.PREFILL, incarnation=1, sketches={Measure.FIRST: first}),),
        measured_s=1.0,
    )
    return [wire.batch_to_wire(batch).SerializeToString()]


def _greetings() -> list[bytes]:
    edge = placement_pb2.ProxyIdentity(id="edge", boot=2)
    hello = placement_pb2.Hello(proxy=edge, address="a:1", pid=7, highest_epoch=1)
    ack = placement_pb2.Ack(epoch=1, version=1, resident=wire.residency_to_wire({"p1": 2}))
    said = (
        placement_pb2.ProxyMessage(hello=hello),
        placement_pb2.ProxyMessage(ack=ack),
        placement_pb2.ProxyMessage(nack=placement_pb2.Nack(epoch=1, version=1, reason="no")),
        placement_pb2.ProxyMessage(goodbye=placement_pb2.Goodbye(proxy=edge, reason="ends")),
    )
    return [message.SerializeToString() for message in said]


def _placements() -> list[bytes]:
    both = frozenset(Phase)
    engine = EngineEntry(
        id="p1", url="http://p1", role=Phase.PREFILL, phases=both, incarnation=1, quarantine_due=1003.0
    )
    placement = Placement(epoch=1, version=1, engines={"p1": engine})
    message = wire.snapshot_to_wire(placement, now=1000.0)
    change = placement_pb2.Change(epoch=1, base_version=1, version=2, engines=message.engines, removed=["d1"])
    return [message.SerializeToString(), change.SerializeToString()]


def _identities() -> list[bytes]:
    version, metrics = b'{"version": "0.32.0"}', b"# TYPE\nprocess_start_time_seconds 1.7e+09\n"
    document = {
        "args": {"a": [1, True], "b": None},
        "model": "tiny",
        "process": {"version": "0.32.0", "started_at": 1.7e9},
    }
    listed = b'{"data": [{"id": "tiny"}]}'
    completed = b'{"choices": [{"text": "a"}]}'
    return [
        b"\0".join(bodies)
        for bodies in (
            (b"", version, metrics),
            *((attested, version, metrics) for attested in _deep(orjson.dumps(document), b"null")),
            (listed,),
            (version, metrics, completed),
        )
    ]


def _fleets() -> list[bytes]:
    minimal = b"name: f\nmodel: m\nengines:\n- {id: p1, url: 'http://p1:1', role: prefill}\n"
    return [minimal, *(path.read_bytes() for path in sorted(EXAMPLES.glob("**/*.yaml")))]


TARGETS: dict[str, Target] = {
    "prefill-answer": Target(
        json=True,
        holds=engines.prefill_answer,
        seeds=lambda: [
            b'{"id":"cmpl-1","usage":{"prompt_tokens": 9},"kv_transfer_params":%b}' % handoff
            for handoff in _nested(orjson.dumps(HANDOFF))
        ],
        words=(*IN_JSON, *(b'"%b"' % name.encode() for name in HANDOFF)),
    ),
    "decode-answer": Target(
        json=True,
        holds=engines.decode_answer,
        seeds=lambda: [
            b'{"choices": [{"text": "a", "finish_reason": "abort"}], "usage": {"completion_tokens": 3}}',
            b'{"error": {"message": "no"}}',
            b'{"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]}',
        ],
        words=(*IN_JSON, b'"completion_tokens":', b'"abort"', b'"detail"', b'"message"', b'"count"'),
    ),
    "event": Target(
        holds=engines.event,
        seeds=lambda: [token(), ERROR, ROLE, ABORT, DONE, USAGE, b": ping\n\n"],
        words=IN_STREAMS,
    ),
    "stream": Target(holds=engines.stream, seeds=lambda: _cut(*_streams()), words=IN_STREAMS),
    "engine-http": Target(holds=engines.engine_http, seeds=lambda: _cut(*_answers()), words=(*IN_HTTP, *IN_STREAMS)),
    "check-answers": Target(
        json=True,
        holds=engines.check_answers,
        seeds=_identities,
        words=(*IN_JSON, b"\0", b"process_start_time_seconds ", b"nan", b"inf", b'"started_at"', b'"version"', b'"id"'),
    ),
    "client-body": Target(
        json=True,
        holds=clients.body,
        seeds=lambda: [
            *_nested(orjson.dumps(BODY)),
            orjson.dumps(CHAT),
            orjson.dumps({**BODY, "vllm_xargs": {"a": 1}}),
        ],
        words=(*IN_JSON, b'"ec_transfer_params"', b'"vllm_xargs"', b'"prompt"', b'"n"', b'"stream"', b'"model"'),
    ),
    "client-http": Target(
        holds=clients.http, seeds=lambda: _cut(*_requests()), words=(*IN_HTTP, b"POST / HTTP/1.1\r\n", b"GET ")
    ),
    "report": Target(holds=peers.report, seeds=_reports),
    "proxy-message": Target(holds=peers.proxy_message, seeds=_greetings),
    "placement": Target(holds=peers.snapshot, seeds=_placements),
    "proxy-settings": Target(
        json=True,
        holds=peers.proxy_settings,
        seeds=lambda: [ProxySettings(name="f", model="m").to_json(), b'{"name": "f", "model": "m", "unheard_of": 1}'],
        words=IN_JSON,
    ),
    "lease": Target(
        json=True,
        holds=files.lease,
        seeds=lambda: [b'{"epoch": 3, "holder": "a", "address": "h:1", "token": "t"}'],
        words=(*IN_JSON, b'"epoch"', b"Infinity", b"NaN"),
    ),
    "history": Target(
        json=True,
        holds=files.history,
        seeds=lambda: [
            orjson.dumps(to_document(History().began(Epoch(epoch=3, holder="a", address="h:1", began_at=1.0))))
        ],
        words=(*IN_JSON, b'"epochs"'),
    ),
    "handoff-document": Target(
        json=True,
        holds=files.document,
        seeds=lambda: _nested(files.good()),
        words=(*IN_JSON, b'"d1"', b'"p1"', b'"drain"', b"1e300"),
    ),
    "journal": Target(
        json=True,
        holds=files.journal,
        seeds=lambda: [files.good_journal()],
        words=(*IN_JSON, b'"Tick"', b'"start"', b"1e300"),
    ),
    "fleet-file": Target(
        holds=files.fleet_file, seeds=_fleets, words=(b"&a ", b"*a", b"<<: ", b"!!", b"- ", b": ", b"${SECRET}", b"? ")
    ),
}


@cache
def seeds(name: str) -> tuple[bytes, ...]:
    """What a target begins with. Made once."""
    return tuple(TARGETS[name].seeds())
