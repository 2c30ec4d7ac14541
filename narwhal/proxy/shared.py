"""What all requests of one worker have in common; no behaviour."""

import random
from dataclasses import dataclass

from narwhal.clock import Clock
from narwhal.connectors.base import Connector
from narwhal.proxy.admission import RetryBudget
from narwhal.proxy.choosing import Chooser
from narwhal.proxy.legs import Legs
from narwhal.proxy.metrics import Metrics
from narwhal.proxy.seams import Feed, Inflight
from narwhal.proxy.sidestep import Sidestep
from narwhal.proxy.vigil import Vigil
from narwhal.proxy.witness import Witness


@dataclass(slots=True)
class Shared:
    """What all requests of one worker have in common."""

    feed: Feed
    inflight: Inflight
    legs: Legs
    connector: Connector
    witness: Witness
    vigil: Vigil
    sidestep: Sidestep
    metrics: Metrics
    clock: Clock
    draws: random.Random
    budget: RetryBudget
    chooser: Chooser
