"""The `/sim/*` routes: what happened on an engine, and its faults.

They work whatever state the engine is in, while it listens. `engine` in a query or a fault's body names another engine
of the same operating-system process: the way to reach one that is down.
"""

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from narwhal.sim import faults
from narwhal.sim.faults import Hook
from narwhal.sim.openai_api import ApiError, Json, load
from narwhal.sim.wire import JSON, Request, head

if TYPE_CHECKING:
    from narwhal.sim.engine import Engine


class Admin:
    """Answers the `/sim/*` requests that came to one engine."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def dispatch(self, request: Request) -> None:
        """Answer, now or once the engine has changed its state."""
        try:
            query = {key: values[-1] for key, values in parse_qs(request.query).items()}
            fields = load(request.body) if request.method == "POST" else query
            engine = self._named(fields.pop("engine", None))
            route = (request.method, request.path)
            if route == ("POST", "/sim/fault"):
                self._engine.spawn(self._set_fault(request, engine, fields))
            elif route == ("DELETE", "/sim/fault"):
                self._engine.spawn(self._clear_faults(request, engine, query.get("mode")))
            elif request.method == "GET":
                _reply(request, 200, self._view(engine, request.path, query))
            else:
                raise ApiError(404, f"no such route: {request.method} {request.path}", "NotFoundError")
        except ApiError as error:
            _send(request, error.status, error.body)

    def _named(self, name: Any) -> "Engine":
        if name is None:
            return self._engine
        if name not in self._engine.siblings:
            raise ApiError(404, f"no engine {name!r} in this process", "NotFoundError", "engine")
        return self._engine.siblings[name]

    def _view(self, engine: "Engine", path: str, query: dict[str, str]) -> Any:
        if path == "/sim/ledger":
            return engine.ledger.view(engine.now())
        if path == "/sim/state":
            return state(engine)
        if path == "/sim/engines":
            return [state(sibling) for sibling in engine.siblings.values()]
        if path == "/sim/requests":
            after = query.get("after", "0")
            if not after.isdecimal():
                raise ApiError(400, f"after: must be a number, got {after!r}", param="after")
            return engine.requests.view(phase=query.get("phase"), after=int(after))
        raise ApiError(404, f"no such route: GET {path}", "NotFoundError")

    async def _set_fault(self, request: Request, engine: "Engine", fields: Json) -> None:
        mode = fields.pop("mode", None)
        try:
            fault = faults.make(str(mode), fields)
        except ValueError as error:
            return _send(request, 400, ApiError(400, str(error)).body)
        cuts = Hook.ACT in fault.row.hooks or fault.row.name == "refuse"
        if cuts and engine is self._engine:
            # The answer goes out first: the connection may not live to carry it.
            request.keep_alive = False
            _reply(request, 200, {"fault": fault.view(), "state": state(engine)})
            await request.conn.drained()
            await engine.add_fault(fault)
        else:
            await engine.add_fault(fault)
            _reply(request, 200, {"fault": fault.view(), "state": state(engine)})
        return None

    async def _clear_faults(self, request: Request, engine: "Engine", mode: str | None) -> None:
        cleared = await engine.clear_faults(mode)
        _reply(request, 200, {"cleared": cleared, "state": state(engine)})


def state(engine: "Engine") -> Json:
    """What an engine is at this moment."""
    return {
        "id": engine.id,
        "url": engine.url,
        "pid": os.getpid(),
        "life": engine.life.value,
        "generation": engine.generation,
        "start_time": engine.started_wall,
        "engine_id": engine.engine_id,
        "kv_port": engine.side.port,
        "model": engine.model,
        "in_flight": len(engine.live),
        "connections": len(engine.connections),
        "requests": {phase.value: count for phase, count in engine.requests.by_phase.items()},
        "bad_requests": engine.bad_requests,
        "transfers": {"ok": engine.transfers.ok, "failed": engine.transfers.failed},
        "handoffs": engine.ledger.totals(engine.now()),
        "faults": [fault.view() for fault in engine.faults.active],
    }


def _reply(request: Request, status: int, body: Any) -> None:
    _send(request, status, orjson.dumps(body))


def _send(request: Request, status: int, body: bytes) -> None:
    request.conn.write(head(status, JSON, len(body), close=not request.keep_alive) + body)
    request.conn.finished()
