"""How much an hour of control grows etcd's database, with and without its own compaction.

`python -m scripts.bench.etcd_growth [--engines N] [--writes N] [--pace N]`; six minutes with the defaults, most of them
idle. Control stores its state once a second. Here that goes `pace` times as fast, on two etcd servers side by side: one
that keeps everything, as etcd does unless told otherwise, and one that compacts what is older than five minutes of
control's time (`--auto-compaction-mode=periodic --auto-compaction-retention=5m` in life). The documents are those of a
fleet of that many engines, four proxies and requests that are counted.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import orjson

from narwhal.clock import RealClock
from narwhal.control.core.events import Reported
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import to_document
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.control.store.etcd import EtcdStore
from narwhal.control.store.etcd_client import EtcdSettings
from narwhal.reports import Batch, ProxyKey, RequestCounts
from narwhal.vocabulary import Phase
from tests.etcd import Etcd

RETENTION_S = 300  # of control's time
SHOWN = 6
MIB = 1024 * 1024
PROXIES = tuple(ProxyKey(id=f"proxy-{n}", slot=0, boot=1) for n in range(4))


class Documents:
    """State handoffs as control would write them, each with more counted than the one before."""

    def __init__(self, engines: int) -> None:
        specs = tuple(
            EngineSpec(id=f"engine-{n}", url=f"http://10.0.0.{n}:8000", role=Phase.DECODE if n % 2 else Phase.PREFILL)
            for n in range(engines)
        )
        settings = CoreSettings(name="bench", model="m", engines=specs)
        self._fleet = Fleet(settings, now=0.0, epoch=1)
        self._written = 0

    def next(self) -> bytes:
        """The next one."""
        self._written += 1
        for proxy in PROXIES:
            batch = Batch(proxy=proxy, sequence=self._written, requests=RequestCounts(served=25), runs=())
            self._fleet.handle(Reported(batch=batch), now=float(self._written))
        state = self._fleet.save(now=float(self._written))
        return orjson.dumps(to_document(state, wall=1.8e9 + self._written, epoch=1, holder="control-a"))


def size(etcd: Etcd) -> int:
    """Of the database file, as etcd counts it against its quota."""
    with etcd.client() as client:
        return int(client.status().db_size)


async def write(etcd: Etcd, writes: int, pace: float, documents: list[bytes]) -> list[int]:
    """Stores every document at its time. Sizes now and then."""
    settings = EtcdSettings(endpoints=etcd.endpoints, prefix="/narwhal", fleet="bench", ttl_s=10, safety_margin_s=0.5)
    store = await EtcdStore.open(settings, RealClock(), warn=print, patience_s=0.0)
    sizes = [await asyncio.to_thread(size, etcd)]
    try:
        lease = await store.acquire("control-a", "10.0.0.11:7400")
        assert lease is not None
        began = asyncio.get_running_loop().time()
        for number, document in enumerate(documents, 1):
            await store.save(lease, document)
            if number % (writes // SHOWN) == 0:
                sizes.append(await asyncio.to_thread(size, etcd))
            await asyncio.sleep(began + number / pace - asyncio.get_running_loop().time())
        await store.release(lease)
    finally:
        await store.close()
    return sizes


def defragmented(etcd: Etcd) -> int:
    """The size once etcd has given back what is free in the file."""
    with etcd.client() as client:
        client.defragment()
    return size(etcd)


async def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=20)
    parser.add_argument("--writes", type=int, default=3600)
    parser.add_argument("--pace", type=float, default=10.0)
    chosen = parser.parse_args()
    source = Documents(chosen.engines)
    documents = [source.next() for _ in range(chosen.writes)]
    print(
        f"{chosen.writes} documents of {chosen.engines} engines, {len(documents[-1])} bytes each, MiB of the database"
    )
    flags = [f"--auto-compaction-retention={RETENTION_S / chosen.pace:g}s", "--auto-compaction-mode=periodic"]
    with (
        tempfile.TemporaryDirectory() as directory,
        Etcd(Path(directory) / "keeps") as keeps,
        Etcd(Path(directory) / "compacts", flags=flags) as compacts,
    ):
        both = (keeps, compacts)
        results = await asyncio.gather(*(write(e, chosen.writes, chosen.pace, documents) for e in both))
        for name, etcd, sizes in zip(("keeps everything", "compacts"), both, results, strict=True):
            shown = " ".join(f"{each / MIB:7.1f}" for each in sizes)
            after = await asyncio.to_thread(defragmented, etcd)
            print(f"{name:17} {shown}  defragmented {after / MIB:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
