"""What Narwhal takes for granted about engines, read from the recordings of real ones.

A fresh recording of another version may break one of these; then the connector, and not only the simulation, has to
change.
"""

import json
from pathlib import Path
from typing import Any

import pytest

RECORDINGS = sorted((Path(__file__).parent / "recorded").glob("vllm-*"))
pytestmark = pytest.mark.parametrize("folder", RECORDINGS, ids=[folder.name for folder in RECORDINGS])


def responses(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """The responses of a recording by the names of their steps."""
    document = json.loads((folder / f"{name}.json").read_text())
    return {step["step"]: step["response"] for step in document["steps"]}


def every_step(folder: Path) -> list[dict[str, Any]]:
    return [step for path in sorted(folder.glob("*.json")) for step in json.loads(path.read_text())["steps"]]


def stream_text(response: dict[str, Any]) -> str:
    choices = [choice for event in response["events"][:-1] for choice in event["choices"]]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def test_a_prefill_leg_answers_with_a_handoff_of_the_fields_that_are_checked(folder: Path) -> None:
    legs = [step for step in every_step(folder) if step["step"].startswith(("prefill leg", "new prefill leg"))]
    assert legs
    for leg in legs:
        handoff = leg["response"]["json"]["kv_transfer_params"]
        assert handoff["do_remote_prefill"] is True
        assert handoff["do_remote_decode"] is False
        assert isinstance(handoff["remote_engine_id"], str)
        assert handoff["remote_engine_id"]
        assert isinstance(handoff["remote_request_id"], str)
        assert handoff["remote_request_id"]
        assert isinstance(handoff["remote_host"], str)
        assert isinstance(handoff["remote_port"], int)
        for group in handoff["remote_block_ids"]:
            assert all(isinstance(block, int) and block >= 0 for block in group)


def test_the_two_legs_give_the_text_that_one_engine_gives(folder: Path) -> None:
    alone = responses(folder, "local")
    both = responses(folder, "completion")["decode leg"]["json"]
    assert both["choices"][0]["text"] == alone["completion"]["json"]["choices"][0]["text"]
    chat = responses(folder, "chat-stream")["decode leg"]
    assert stream_text(chat) == stream_text(alone["streamed chat"])


def test_ids_are_made_from_the_request_id_that_was_sent(folder: Path) -> None:
    named = [step for step in every_step(folder) if (step["response"].get("json") or {}).get("id")]
    assert named
    for step in named:
        sent = step["request"]["headers"]["X-Request-Id"]
        assert step["response"]["json"]["id"] in {f"cmpl-{sent}", f"chatcmpl-{sent}"}


def test_the_first_event_of_a_chat_has_the_role_and_no_text(folder: Path) -> None:
    first = responses(folder, "chat-stream")["decode leg"]["events"][0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_usage_comes_last_before_the_marker(folder: Path) -> None:
    *_, finish, usage, marker = responses(folder, "completion-stream-usage")["decode leg"]["events"]
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert marker == "[DONE]"


def test_the_headers_of_a_stream_come_before_the_transfer(folder: Path) -> None:
    timing = responses(folder, "producer-frozen")["decode leg"]["timing"]
    assert timing["headers_s"] < 2
    assert timing["first_event_s"] > 10


@pytest.mark.parametrize("step", ["decode leg, stream", "decode leg, streamed chat"])
def test_a_failed_transfer_is_a_200_with_an_error_event_and_the_marker(folder: Path, step: str) -> None:
    response = responses(folder, "producer-dead")[step]
    assert response["status"] == 200
    *before, error, marker = response["events"]
    # A chat says its role before it fails: an event with choices is no proof of a token.
    roles = [{"role": "assistant", "content": ""}] if step.endswith("chat") else []
    assert [event["choices"][0]["delta"] for event in before] == roles
    assert error["error"]["code"] == 500
    assert marker == "[DONE]"


def test_a_whole_answer_after_a_failed_transfer_is_a_500_and_the_engine_lives_on(folder: Path) -> None:
    steps = responses(folder, "producer-dead")
    assert steps["decode leg, whole answer"]["status"] == 500
    assert steps["serves afterwards"]["status"] == 200


def test_an_expired_handoff_is_answered_as_if_nothing_were_wrong(folder: Path) -> None:
    assert responses(folder, "handoff-expired")["decode leg"]["status"] == 200


def test_a_handoff_used_for_another_prompt_gives_the_first_prompts_text(folder: Path) -> None:
    steps = responses(folder, "handoff-used-twice")
    right, stolen = (
        steps[name]["json"]["choices"][0]["text"] for name in ("decode leg", "decode leg of another prompt")
    )
    assert steps["decode leg of another prompt"]["status"] == 200
    # The rest follows the other prompt's last tokens, which were computed in place.
    assert right.split()[0] == stolen.split()[0]


def test_a_killed_engines_stream_is_cut(folder: Path) -> None:
    killed = responses(folder, "killed-in-stream")["stream"]
    assert killed["end"] == "cut"
    assert "[DONE]" not in killed["events"]


def test_a_stream_whose_core_is_killed_ends_with_an_error_and_the_marker(folder: Path) -> None:
    ended = responses(folder, "core-killed-in-stream")["stream"]
    assert ended["end"] == "complete"
    assert ended["events"][-1] == "[DONE]"
    assert "error" in ended["events"][-2]


def test_an_engine_that_is_asked_to_end_passes_broken_answers_off_as_finished_ones(folder: Path) -> None:
    """No error, the marker, status 200: only the finish reason tells."""
    ended = responses(folder, "terminated-in-stream-aborting")["stream"]
    assert ended["end"] == "complete"
    assert ended["events"][-1] == "[DONE]"
    assert ended["events"][-2]["choices"][0]["finish_reason"] == "abort"
    assert not any("error" in event for event in ended["events"])
    whole = responses(folder, "terminated-in-whole-answer")["whole answer"]
    assert whole["status"] == 200
    assert whole["json"]["choices"][0]["finish_reason"] == "abort"
    assert whole["json"]["usage"]["completion_tokens"] < 1500


def test_an_engine_that_is_asked_to_end_may_fall_silent_on_an_open_connection(folder: Path) -> None:
    steps = responses(folder, "terminated-in-stream-silently")
    assert steps["stream"]["end"] == "unfinished"
    assert steps["health in the end"]["end"] == "refused"


def test_health_lies_when_only_the_core_is_stopped(folder: Path) -> None:
    steps = responses(folder, "consumer-core-frozen")
    assert steps["GET /health"]["status"] == 200
    assert steps["stream"]["status"] == 200
    assert steps["stream"]["events"] == []
    assert steps["whole answer"]["end"] == "silent"


@pytest.mark.parametrize(
    "name", ["lethal-flag-alone", "lethal-without-engine-id", "lethal-fewer-blocks", "lethal-without-request-id"]
)
def test_a_malformed_handoff_ends_the_engine(folder: Path, name: str) -> None:
    assert responses(folder, name)["health in the end"]["end"] == "refused"


def test_a_producer_that_came_back_under_its_old_id_is_unusable_to_its_peer(folder: Path) -> None:
    steps = responses(folder, "producer-restarted-same-id")
    assert [steps[f"new decode leg {number}"]["status"] for number in (1, 2)] == [500, 500]
    assert steps["producer health"]["status"] == steps["consumer health"]["status"] == 200
    assert responses(folder, "producer-restarted")["new decode leg"]["status"] == 200
