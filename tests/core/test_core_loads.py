"""What a role's load is made of, with measures given exactly (spec C3)."""

from dataclasses import replace

import pytest

from narwhal.control.core.loads import Load, measured
from narwhal.control.core.settings import CoreSettings, RoleSettings
from narwhal.measures import Measure, middle
from narwhal.vocabulary import Phase
from tests.core.given import Given, sketch

P, D = Phase.PREFILL, Phase.DECODE
NOW = 1000.0


@pytest.mark.rule("C3")
def test_what_a_load_is_made_of() -> None:
    given = Given()
    settings = CoreSettings(
        name="f", model="m", engines=(), monitor_interval_s=0.5, roles=RoleSettings(ttft_s=2.0, tpot_s=0.5)
    )
    for phase in Phase:
        given.sketches[phase] = {
            Measure.FIRST: sketch(b0=89, b3=11),  # nine legs in ten keep within the value of bucket 3
            Measure.STEP: sketch(b1=9, b9=1),
            Measure.WAIT: sketch(b2=90, b5=10),
            Measure.PROMPT: sketch(b70=50, b80=50),
            Measure.OUTPUT: sketch(b60=49, b65=51),
        }
    given.legs = {P: 480, D: 12}
    given.share = {P: 0.25, D: 0.75}
    given.windows = 4
    common = Load(
        first_s=middle(3),
        step_s=middle(1),
        wait_s=middle(2),
        prompt_tokens=middle(70),
        output_tokens=middle(65),
        latency=middle(3) / 2.0,
    )
    # 100 legs came to an end in four intervals of half a second: 480 that wait would take 9.6 s.
    assert measured(P, settings, given, now=NOW) == replace(
        common, waiting=480, queue_s=9.6, load=4.8, occupied=4.8, busy=0.25
    )
    # Decode is held to its steps too, and being busy is no sign that it cannot give up an engine.
    assert measured(D, settings, given, now=NOW) == replace(
        common, waiting=12, queue_s=0.24, latency=middle(1) / 0.5, load=middle(1) / 0.5, occupied=middle(1) / 0.5,
        busy=0.75,
    )  # fmt: skip
    given.legs, given.share = {P: 0, D: 0}, {P: 0.9, D: 0.0}
    load = measured(P, settings, given, now=NOW)
    assert (load.load, load.occupied) == (middle(3) / 2.0, 0.9)


@pytest.mark.rule("C3")
def test_of_legs_that_wait_while_none_comes_to_an_end_each_takes_all_the_time() -> None:
    given = Given()
    given.legs = {P: 3, D: 0}
    settings = CoreSettings(name="f", model="m", engines=(), roles=RoleSettings(ttft_s=10.0))
    load = measured(P, settings, given, now=NOW)
    assert load == Load(load=1.5, occupied=1.5, queue_s=15.0, waiting=3)
    assert measured(D, settings, given, now=NOW) == Load()
