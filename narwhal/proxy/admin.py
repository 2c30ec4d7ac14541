"""The supervisor's HTTP port: /health, /ready and /metrics of all workers together.

A scrape of the shared port reaches one worker, whichever took the connection; this one reaches all.
"""

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from narwhal.proxy.metrics import ProxyCollector
from narwhal.proxy.supervisor import Supervisor

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def admin_http(supervisor: Supervisor) -> web.Application:
    """The application."""

    async def health(_request: web.Request) -> web.Response:
        workers = {str(slot): pid for slot, pid in sorted(supervisor.pids.items())}
        return web.json_response({"status": "ok", "workers": workers})

    async def ready(_request: web.Request) -> web.Response:
        reason = await supervisor.not_ready()
        body = {"status": "not ready" if reason else "ready", "reason": reason}
        return web.json_response(body, status=503 if reason else 200)

    async def metrics(_request: web.Request) -> web.Response:
        fleet, merged = await supervisor.metrics()
        registry = CollectorRegistry()
        registry.register(ProxyCollector(lambda: fleet, lambda: merged))
        return web.Response(body=generate_latest(registry), headers={"Content-Type": _TEXT})

    application = web.Application()
    application.router.add_get("/health", health)
    application.router.add_get("/ready", ready)
    application.router.add_get("/metrics", metrics)
    return application
