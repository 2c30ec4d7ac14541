"""Prints placement as it changes: a subscriber written against protos/ alone, without the narwhal package.

Needs grpcio and grpcio-tools.  usage: python examples/watch_placement.py [HOST:PORT] [--count N]
"""

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc

PROTO = Path(__file__).resolve().parent.parent / "protos" / "narwhal" / "v1" / "placement.proto"


def generated() -> tuple[object, object]:
    """Compiles the proto into a folder of its own and imports what came out."""
    with tempfile.TemporaryDirectory() as out:
        outputs = [f"--python_out={out}", f"--grpc_python_out={out}"]
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}", *outputs, PROTO.name], check=True
        )
        sys.path.insert(0, out)
        try:
            return importlib.import_module("placement_pb2"), importlib.import_module("placement_pb2_grpc")
        finally:
            sys.path.remove(out)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("control", nargs="?", default="127.0.0.1:7400")
    parser.add_argument("--count", type=int, default=0, help="end after so many placements; 0 for never")
    options = parser.parse_args()
    pb2, services = generated()
    phase = {1: "prefill", 2: "decode"}
    engines: dict[str, object] = {}
    seen = 0
    with grpc.insecure_channel(options.control) as channel:
        stub = services.PlacementServiceStub(channel)  # type: ignore[attr-defined]
        request = pb2.WatchPlacementRequest(name="example")  # type: ignore[attr-defined]
        try:
            for message in stub.WatchPlacement(request):
                kind = message.WhichOneof("message")
                if kind == "farewell":
                    print(f"goodbye: {message.farewell.reason}", flush=True)
                if kind not in ("snapshot", "change"):
                    continue
                news = getattr(message, kind)
                if kind == "snapshot":
                    engines.clear()
                for gone in news.removed if kind == "change" else ():
                    del engines[gone]
                engines.update((engine.id, engine) for engine in news.engines)
                print(f"{kind} {news.epoch}.{news.version} admission {news.closed or 'open'}", flush=True)
                for engine in news.engines:
                    serves = "+".join(phase[p] for p in engine.phases) or "nothing"
                    holds = f" ({', '.join(engine.holds)})" if engine.holds else ""
                    print(f"  {engine.id} serves {serves}{holds}", flush=True)
                seen += 1
                if seen == options.count:
                    return
        except grpc.RpcError as error:
            sys.exit(f"{options.control}: {error.code().name}: {error.details()}")
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
