"""A slice of `soak_server.py`, and that it can fail."""

import json

import pytest
import soak_server
from soak_server import Attack, draw, judge

pytestmark = pytest.mark.long("hf_clover/apps")

JSON, STREAM = "application/json", "text/event-stream"
FIELDS = ("message", "type", "param", "code")


def test_random_attacks_find_no_fault(request):
    """`python tests/soak_server.py` runs for longer."""
    found = soak_server.soak(iter(range(90_000, 91_000)), count=300 if request.config.option.all else 60)
    assert found.faults == []
    assert found.tried["seeded"] > 5
    assert found.said["accepted_tokens"] > 50, "a test that accepts nothing proves nothing"
    assert found.said["/health answers"] > 5


@pytest.mark.parametrize(
    ("status", "kind", "content", "fault"),
    [
        (500, JSON, b"{}", "status 500"),
        (200, JSON, b"{}", "no answer"),
        (200, JSON, b"oops", "no JSON"),
        (400, JSON, b'{"detail": [{"input": "all of it"}]}', "no error object"),
        (400, JSON, json.dumps({"error": dict.fromkeys(FIELDS, "x" * 999)}).encode(), "bytes: 400"),
        (200, JSON, b'{"choices": [{"text": "b"}]}', "the seeded text 'b' instead of 'a'"),
        (200, STREAM, b'data: {"choices": [{"text": "b"}]}\n\ndata: [DONE]\n\n', "the seeded text 'b' instead of 'a'"),
        (200, STREAM, b'data: {"choices": [{"text": "a"}]}\n\n', "a stream that does not end"),
        (200, STREAM, b'data: {"error": {}}\n\n', "an error in a stream"),
    ],
)
def test_a_wrong_answer_is_judged_a_fault(status, kind, content, fault):
    assert fault in judge(Attack(0, "seeded", wanted="x"), status, kind, content, {"x": "a"})


def test_a_right_answer_is_no_fault():
    attack, texts = Attack(0, "seeded", wanted="x"), {"x": "a"}
    assert judge(attack, 200, JSON, b'{"choices": [{"text": "a"}]}', texts) is None
    assert judge(attack, 200, STREAM, b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', texts) is None


def test_an_attack_follows_from_its_number_and_every_kind_occurs():
    assert [draw(seed) for seed in range(200)] == [draw(seed) for seed in range(200)]
    assert {draw(seed).kind for seed in range(500)} == {*soak_server.WEIGHTS}
