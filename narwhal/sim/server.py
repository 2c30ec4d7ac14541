"""The HTTP surface of a simulated engine: which route a request takes, and the answers that need no engine core."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from narwhal.sim import misbehave, text
from narwhal.sim.admin import Admin
from narwhal.sim.faults import Fault, Hook
from narwhal.sim.generation import Generation
from narwhal.sim.openai_api import INTERNAL, ApiError, Json, invalid, load, no_such_model
from narwhal.sim.records import Outcome, Record, RequestPhase
from narwhal.sim.wire import JSON, Request, head

if TYPE_CHECKING:
    from narwhal.sim.engine import Engine

_COMPLETIONS = frozenset({"/v1/completions", "/v1/chat/completions"})
_ROUTES: dict[str, tuple[str, RequestPhase]] = {
    "/v1/completions": ("POST", RequestPhase.LOCAL),
    "/v1/chat/completions": ("POST", RequestPhase.LOCAL),
    "/tokenize": ("POST", RequestPhase.TOKENIZE),
    "/v1/models": ("GET", RequestPhase.MODELS),
    "/health": ("GET", RequestPhase.HEALTH),
    "/version": ("GET", RequestPhase.VERSION),
    "/metrics": ("GET", RequestPhase.METRICS),
}
_METRICS = b"text/plain; version=1.0.0; charset=utf-8"
_PERMISSION = {
    "id": "modelperm-0000000000000000",
    "object": "model_permission",
    "created": 0,
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


class Api:
    """Answers one engine's requests."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._admin = Admin(engine)
        self._handlers: dict[str, Callable[[Request, Record], None]] = {
            "/tokenize": self._tokenize,
            "/v1/models": self._models,
            "/health": self._health,
            "/version": self._version,
            "/metrics": self._metrics,
        }

    def dispatch(self, request: Request) -> None:
        """A request came whole."""
        if request.path.startswith("/sim/"):
            self._admin.dispatch(request)
            return
        engine = self._engine
        method, phase = _ROUTES.get(request.path, ("", RequestPhase.OTHER))
        fields: Json | ApiError = {}
        if request.path in _COMPLETIONS and request.method == method:
            fields, phase = _read(request.body)
        record = engine.requests.begin(request, phase, engine.now())
        request.on_disconnect = partial(self._disconnected, record)
        if engine.frozen():
            engine.hold(partial(self._begin, request, record, fields))
        else:
            self._begin(request, record, fields)

    def _disconnected(self, record: Record) -> None:
        record.end(Outcome.DISCONNECTED, self._engine.now())

    def _begin(self, request: Request, record: Record, fields: Json | ApiError) -> None:
        if not request.conn.open:
            return
        faults = self._engine.faults.take(Hook.ANSWER, record.phase)
        if faults:
            self._engine.spawn(self._bent(faults, request, record, fields))
        else:
            self._serve(request, record, fields)

    async def _bent(self, faults: list[Fault], request: Request, record: Record, fields: Json | ApiError) -> None:
        """Let the faults before the headers act, then go on as usual unless they ended the request."""
        task = asyncio.current_task()
        assert task is not None

        def gone() -> None:
            self._disconnected(record)
            task.cancel()

        request.on_disconnect = gone
        what = await misbehave.before_answer(faults, request.conn)
        if what == "hang":
            await asyncio.get_running_loop().create_future()
        elif what == "closed":
            record.end(Outcome.FAULTED, self._engine.now())
        elif isinstance(what, ApiError):
            self._refuse(request, record, what)
        else:
            request.on_disconnect = partial(self._disconnected, record)
            self._serve(request, record, fields)

    def _serve(self, request: Request, record: Record, fields: Json | ApiError) -> None:
        route = _ROUTES.get(request.path)
        if route is None:
            self._reply(request, record, 404, b'{"detail":"Not Found"}')
        elif request.method != route[0]:
            allow = ((b"allow", route[0].encode()),)
            self._reply(request, record, 405, b'{"detail":"Method Not Allowed"}', extra=allow)
        elif not self._authorized(request):
            self._refuse(request, record, ApiError(401, "Unauthorized", "AuthenticationError"))
        elif request.path not in _COMPLETIONS:
            self._handlers[request.path](request, record)
        elif isinstance(fields, ApiError):
            self._refuse(request, record, fields)
        elif self._engine.life != "running":
            self._refuse(request, record, INTERNAL)
        else:
            Generation(self._engine, request, record, fields).start()

    def _authorized(self, request: Request) -> bool:
        key = self._engine.options.api_key
        return key is None or not request.path.startswith("/v1/") or request.header(b"authorization") == f"Bearer {key}"

    # -- answers

    def _reply(self, request: Request, record: Record, status: int, body: bytes, **how: Any) -> None:
        """Answer; `how` may name a content type other than JSON (`kind`) and more headers (`extra`)."""
        record.status = status
        record.end(Outcome.ANSWERED, self._engine.now())
        request.on_disconnect = None
        sent = b"" if request.method == "HEAD" else body
        request.conn.write(head(status, how.get("kind", JSON), len(body), extra=how.get("extra", ())) + sent)
        request.conn.finished()

    def _refuse(self, request: Request, record: Record, error: ApiError) -> None:
        self._reply(request, record, error.status, error.body, extra=error.headers)

    def _health(self, request: Request, record: Record) -> None:
        self._reply(request, record, 200 if self._engine.life == "running" else 503, b"", kind=None)

    def _version(self, request: Request, record: Record) -> None:
        self._reply(request, record, 200, orjson.dumps({"version": self._engine.options.version}))

    def _models(self, request: Request, record: Record) -> None:
        engine = self._engine
        listed = {
            "id": engine.model,
            "object": "model",
            "created": int(engine.clock.wall()),
            "owned_by": "vllm",
            "root": engine.model,
            "parent": None,
            "max_model_len": engine.options.max_model_len,
            "permission": [_PERMISSION],
        }
        self._reply(request, record, 200, orjson.dumps({"object": "list", "data": [listed]}))

    def _tokenize(self, request: Request, record: Record) -> None:
        engine = self._engine
        try:
            fields = load(request.body)
            if fields.get("model", engine.model) != engine.model:
                raise no_such_model(fields["model"], engine.model)
            tokens = _prompt_tokens(fields)
        except ApiError as error:
            return self._refuse(request, record, error)
        body = {
            "count": len(tokens),
            "max_model_len": engine.options.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        return self._reply(request, record, 200, orjson.dumps(body))

    def _metrics(self, request: Request, record: Record) -> None:
        engine = self._engine
        totals = engine.ledger.totals(engine.now())
        labels = f'{{engine="0",model_name="{engine.options.model}"}}'
        series = (
            ("process_start_time_seconds", "gauge", "", engine.started_wall),
            ("vllm:num_requests_running", "gauge", labels, float(len(engine.live))),
            ("vllm:num_requests_waiting", "gauge", labels, 0.0),
            ("vllm:nixl_num_failed_transfers_total", "counter", labels, float(engine.transfers.failed)),
            ("vllm:nixl_num_kv_expired_reqs_total", "counter", labels, float(totals["expired"])),
        )
        lines = [f"# TYPE {name} {kind}\n{name}{labelled} {value!r}\n" for name, kind, labelled, value in series]
        self._reply(request, record, 200, "".join(lines).encode(), kind=_METRICS)


def _read(body: bytes) -> tuple[Json | ApiError, RequestPhase]:
    """A completion's fields, or the error that they are, and what its KV parameters make of it."""
    try:
        fields = load(body)
    except ApiError as error:
        return error, RequestPhase.LOCAL
    kv = fields.get("kv_transfer_params")
    if isinstance(kv, dict):
        if kv.get("do_remote_prefill") is True:
            return fields, RequestPhase.DECODE
        if kv.get("do_remote_decode") is True:
            return fields, RequestPhase.PREFILL
    return fields, RequestPhase.LOCAL


def _prompt_tokens(fields: Json) -> list[int]:
    """The tokens of a `/tokenize` request in either form. Raises ApiError."""
    messages = fields.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return text.tokenize(
            text.render_chat(messages, add_generation_prompt=fields.get("add_generation_prompt") is not False)
        )
    if isinstance(fields.get("prompt"), str):
        return text.tokenize(fields["prompt"])
    raise invalid("string_type", "body.prompt", "Input should be a valid string", fields.get("prompt"))
