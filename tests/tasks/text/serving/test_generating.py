"""A language model behind the server: whole texts, streams, and what is refused."""

import json

import pytest
from local_server import Echo, running

from lingvo_moe.tasks.text.serving.limits import Limits


@pytest.fixture(scope="module")
def server():
    with running(Echo(), Limits(max_lines=3, max_line_chars=40, request_timeout=2.0)) as it:
        yield it


def test_texts_of_prompts(server):
    asked = {"text": ["a b", "the end"], "temperature": 0.5, "seed": 4}
    reply = server.Ask("POST", "/generate", asked)
    assert reply.content == {
        "texts": ["a b 4.0", "the end 4.1"],
        "finished": [False, True],
        "truncated": [False, False],
    }
    assert server.Ask("POST", "/generate", {"text": "a\nb"}).content["texts"] == ["a\nb 0.0"]
    for path in ("/", "/translate", "/v1/models/translator:predict"):
        assert server.Ask("POST", path, {"text": "a"}).status == 404
    assert server.Ask("GET", "/health").status == 200


def test_what_a_running_batch_does_is_seen(server):
    """Five steps, one after the other's, are five tokens; the batch of Echo has two layers of two experts."""
    server.Ask("POST", "/generate", {"text": "a b c d"})
    lines = server.Ask("GET", "/metrics").body.decode().splitlines()
    rate = next(line for line in lines if line.startswith("lingvo_moe_tokens_per_second "))
    assert float(rate.split()[1]) >= 0.5
    assert {*lines} >= {
        "lingvo_moe_prompts_waiting 0.0",
        "lingvo_moe_rows_running 0.0",
        "lingvo_moe_draft_tokens_taken_share 0.75",
        'lingvo_moe_dead_experts{layer="0"} 0.5',
        'lingvo_moe_expert_load_max_over_mean{layer="1"} 2.0',
        'lingvo_moe_expert_load_entropy{layer="1"} 0.0',
    }


def test_a_stream_is_of_events(server):
    reply = server.Ask("POST", "/generate", {"text": "grün und blau", "stream": True})
    assert reply.headers["Content-Type"] == "text/event-stream; charset=UTF-8"
    events = reply.body.decode().split("\n\n")
    assert events.pop() == "" and all(event.startswith("data: ") for event in events)
    found = [json.loads(event[6:]) for event in events]
    texts = [{"text": " grün"}, {"text": " und"}, {"text": " blau"}]
    assert found == [*texts, {"text": "", "finished": False}]


def test_a_stream_that_takes_too_long_ends_with_an_error_and_frees_its_place(server):
    model = server.service.translator
    model.gate.clear()
    reply = server.Ask("POST", "/generate", {"text": "a b", "stream": True})
    model.gate.set()
    last = reply.body.decode().split("\n\n")[-2]
    assert json.loads(last[6:]) == {"error": "not done within 2 s; ask for fewer tokens"}
    server.Until(lambda: server.service.running == 0)
    assert server.Ask("POST", "/generate", {"text": "a"}).status == 200


def test_a_stream_of_a_model_that_breaks_ends_with_an_error(server):
    reply = server.Ask("POST", "/generate", {"text": "a poison", "stream": True})
    events = reply.body.decode().split("\n\n")[:-1]
    assert [json.loads(event[6:]) for event in events] == [
        {"text": " a"},
        {"error": "Internal Server Error"},
    ]
    shown = server.Ask("GET", "/metrics").body.decode()
    assert 'requests_total{route="/generate",status="500"} 1' in shown
    for value in ("rows_running 0.0", "pages_used 3.0", "pages_free 5.0", "waiting_lines 0.0"):
        assert f"lingvo_moe_{value}" in shown
    assert server.Ask("POST", "/generate", {"text": "poison", "stream": True}).status == 500


def test_a_panic_of_a_library_ends_no_server(server):
    """Libraries in Rust raise what is no Exception."""
    for stream in (False, True):
        assert server.Ask("POST", "/generate", {"text": "panic", "stream": stream}).status == 500
        assert server.Ask("POST", "/generate", {"text": "a b"}).status == 200


@pytest.mark.parametrize(("asked", "status", "message"), [
    ({}, 400, '"text" is null; give a string or a list of strings'),
    ({"text": ["a"], "stream": True}, 400, '"text" is a list; give a string'),
    ({"text": "a", "stream": 1}, 400, '"stream" is a number; give true or false'),
    ({"text": "a", "max_tokens": 51}, 400, "max_tokens=51: this model gives at most 50"),
    ({"text": "a", "temperature": -1}, 400, "temperature=-1: must be a number"),
    ({"text": "a", "top_p": "x"}, 400, 'top_p="x": must be a number'),
    ({"text": "a", "seed": None}, 400, "seed=null: must be an integer"),
    ({"text": "a", "top_kk": 1}, 400, 'no field "top_kk" (did you mean'),
    ({"text": "a", "min_p": 0.1}, 400, '"min_p" is 0.1, but nothing is drawn: give a "temperature"'),
    ({"text": "a", "seed": 3, "temperature": 0}, 400, '"seed" is 3, but nothing is drawn'),
    ({"text": []}, 400, '"text" is an empty list; give at least one prompt'),
    ({"text": ["a"] * 4}, 413, "4 lines; at most 3 in a request"),
    ({"text": ["a"] * 2, "n": 2, "temperature": 1}, 413, "2 texts 2 times; at most 3 in a request"),
    ({"text": "a" * 41}, 413, "line 1 has 41 characters; at most 40"),
])  # fmt: skip
def test_wrong_requests_are_refused(server, asked, status, message):
    reply = server.Ask("POST", "/generate", asked)
    assert (reply.status, reply.content["error"][: len(message)]) == (status, message)


def test_a_beam_has_no_stream():
    with running(Echo(beam_size=2)) as server:
        for more in ({"stream": True}, {"temperature": 1.0}):
            reply = server.Ask("POST", "/generate", {"text": "a", **more})
            assert reply.status == 400 and "searches with a beam" in reply.content["error"]
        assert server.Ask("POST", "/generate", {"text": "a"}).status == 200
