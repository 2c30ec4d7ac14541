"""The control service's HTTP side: /health, /ready, /metrics, /handoff. Shows what the leader and the core say."""

from collections.abc import Callable, Mapping

import orjson
from aiohttp import web

from narwhal.control.leader import Leader
from narwhal.control.store.base import StoreError


def control_http(leader: Leader, metrics: Callable[[], bytes]) -> web.Application:
    """The HTTP application. `metrics` renders them."""

    async def health(_request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def ready(_request: web.Request) -> web.Response:
        readiness = leader.readiness()
        body = {
            "status": "not ready" if readiness.reason else "ready",
            "reason": readiness.reason,
            "control_ready": readiness.control_ready,
            "epoch": readiness.epoch,
            "holder": readiness.holder,
        }
        return _json(body, status=503 if readiness.reason else 200)

    async def scrape(_request: web.Request) -> web.Response:
        return web.Response(
            body=metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8", **_FRESH}
        )

    async def handoff(_request: web.Request) -> web.Response:
        try:
            document = await leader.document()
        except StoreError as error:
            return _json({"error": str(error)}, status=503)
        if document is None:
            return _json({"error": "no state handoff has been stored yet"}, status=404)
        return web.Response(body=document, content_type="application/json", headers=_FRESH)

    application = web.Application()
    application.add_routes(
        [
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/metrics", scrape),
            web.get("/handoff", handoff),
        ]
    )
    return application


_FRESH = {"Cache-Control": "no-store"}


def _json(body: Mapping[str, object], *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body) + b"\n", status=status, content_type="application/json", headers=_FRESH)
