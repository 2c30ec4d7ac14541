"""HTTP of the sidecar: the document, /health, /ready and /metrics."""

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from narwhal.attest.sidecar import Sidecar
from narwhal.attest.standing import State

DOCUMENT = "/attestation"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class SidecarCollector(Collector):
    """What /metrics shows of a sidecar."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def collect(self) -> list[Metric]:
        sidecar, standing = self._sidecar, self._sidecar.standing
        valid = GaugeMetricFamily("narwhal_attest_valid", "1 while the document holds.")
        valid.add_metric([], float(standing.state is State.VALID))
        asked = CounterMetricFamily(
            "narwhal_attest_verifications",
            "Times the engine was asked which process it is, by what came of it.",
            labels=["result"],
        )
        for result in ("same", "changed", "failed"):
            asked.add_metric([result], getattr(sidecar.counts, result))
        found: list[Metric] = [valid, asked]
        if standing.attested is not None:
            start = GaugeMetricFamily(
                "narwhal_attest_process_start_time_seconds", "Start of the attested process, since the Unix epoch."
            )
            start.add_metric([], standing.attested.started_at)
            found.append(start)
        return found


def attest_http(sidecar: Sidecar) -> web.Application:
    """The application. The document is verified whenever it is asked for; the others show what was last seen."""

    async def document(_request: web.Request) -> web.Response:
        await sidecar.verify()
        status, body = sidecar.standing.answer(sidecar.contract)
        headers = {"Cache-Control": "no-store"}
        return web.Response(
            status=status, body=orjson.dumps(body), headers=headers, content_type="application/json", charset="utf-8"
        )

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(_request: web.Request) -> web.Response:
        standing = sidecar.standing
        holds = standing.state is State.VALID
        body = {"status": "ready" if holds else "not ready", "state": standing.state, "reason": standing.reason}
        return web.json_response(body, status=200 if holds else 503)

    async def metrics(_request: web.Request) -> web.Response:
        registry = CollectorRegistry()
        registry.register(SidecarCollector(sidecar))
        return web.Response(body=generate_latest(registry), headers={"Content-Type": _TEXT})

    application = web.Application()
    for path, answer in ((DOCUMENT, document), ("/health", health), ("/ready", ready), ("/metrics", metrics)):
        application.router.add_get(path, answer)
    return application
