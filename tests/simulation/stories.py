"""Seeds with a story: each once found a real bug, and runs clean since it was put right.

A seed is a run only for as long as nothing else draws from it, so every story also has a test of its own beside the
code that it is about; the seed is kept because what came of the fix may come back in other clothes.
"""

from dataclasses import dataclass

from tests.simulation.world import Invariant


@dataclass(frozen=True, kw_only=True)
class Story:
    """One bug that the simulation found."""

    seed: int
    rule: Invariant  # the invariant that it broke
    told: str


STORIES = {
    "successes-during-a-slow-sweep": Story(
        seed=639,
        rule=Invariant.BLAME,
        told="Control was cut off from the engines. A sweep waited five seconds for a connection that timed out, and "
        "at its end forgot whom proxies had heard meanwhile; the next sweep took those engines for silent to everybody "
        "and ejected them, though they served all the time (spec L4). What proxies tell while a sweep runs now speaks "
        "for the sweep after it, too.",
    ),
    "two-failures-of-one-return": Story(
        seed=1370,
        rule=Invariant.NOTHING_RAISES,
        told="A fleet in maintenance was to return as a whole, and the transfers of two engines failed in one step. "
        "The first failure ended the gates of all of them, the second looked for one of these and raised; control "
        "counted a stage error and the return was never told to have failed (spec R6).",
    ),
    "asked-in-the-dark": Story(
        seed=2600,
        rule=Invariant.BLAME,
        told="Control was cut off from the engines and knew it; an operator asked for a probe meanwhile. Control came "
        "back, the sweep said so, and a tenth of a second later the probe's connection timed out: it had been asked "
        "in the dark and was believed in the light, and a healthy engine was ejected (spec L4). Silence now counts "
        "only for what was asked since control is back.",
    ),
    "ready-to-stop-and-forgotten": Story(
        seed=4138,
        rule=Invariant.RECOVERY,
        told="The fleet was drained, and whoever waited was told that it was ready to stop at the moment control lost "
        "the store. The engines were restarted; the process that took over knew neither that nor which processes had "
        "been drained, took the new ones for these, and asked for newer ones for ever (spec R4, R5). It is told now "
        "once it is stored.",
    ),
    "normal-by-one-odd-window": Story(
        seed=483,
        rule=Invariant.RECOVERY,
        told="The first tokens of an engine had lain in the network and came at once, 0.1 ms each. That window was its "
        "baseline, every later one a thousand times as slow, and the engine on probation for good (spec H5). A "
        "baseline is three windows at least.",
    ),
    "sampled-as-the-light-went-out": Story(
        seed=3407,
        rule=Invariant.BLAME,
        told="Control was cut off from the engines, and before a sweep had said so it sampled an engine on probation, "
        "which was unreachable and was ejected; nothing was wrong with it (spec H5, L4). Silence to a probe that no "
        "failure asked for now brings the verification hold, and the probe once more after a sweep.",
    ),
    "suspected-on-its-way-back": Story(
        seed=1294,
        rule=Invariant.NOTHING_RAISES,
        told="An engine was drained, ready to stop, and tried for its return, when a proxy that had been cut from "
        "control told of legs which had failed there before. That put a verification hold on the engine. It passed, "
        "the hold went with its old incarnation and the suspicion stayed: control's own check raised, in each pass "
        "from then on (spec R5, F3). A suspicion ends with the incarnation that it was about.",
    ),
    "longer-probation-slower-peers": Story(
        seed=3654,
        rule=Invariant.RECOVERY,
        told="An engine that went back on probation soon after one had to show twice as many good windows each time. "
        "The load that it did not carry made its peer drift, which took its turn, and with three decode engines "
        "somebody was always out, eleven minutes after the last fault (spec H5). A probation is as long as it was.",
    ),
}
