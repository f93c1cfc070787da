"""`surogate chat`: with a server, and with a model of its own process."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import aclosing

import pytest
from conftest import wait_for
from fake import FakeModel
from surogate_core.errors import ConfigError

from surogate_serve.cli.chat import LocalModel, Server, Talk, Wishes
from surogate_serve.types import Refused

THOUGHT = ["<think>", "Let", " me", " see", "</think>", "Four", "."]


def local(model: FakeModel) -> LocalModel:
    partner = LocalModel.__new__(LocalModel)
    partner._model, partner.names = model, model.names
    return partner


@pytest.fixture(params=["server", "local"])
def partner_of(request, serve):
    """partner_of(model): the same model behind either."""

    def make(model):
        return local(model) if request.param == "local" else Server(serve(model).url, None)

    return make


def talk(partner, *lines, **wishes):
    spoken = Talk(partner, Wishes(partner.names[0], **wishes))
    spoken.run(iter(lines))
    return spoken


def test_turns_go_on(partner_of, capsys):
    model = FakeModel()
    spoken = talk(partner_of(model), "Hi", "", "More", "/exit", "never", temperature=0.25, max_tokens=9)
    out, told = capsys.readouterr()
    assert out == "Hello there!\nHello there!\n" and "4 tokens" in told and "3 of" in told
    assert [each["role"] for each in model.rendered[-1][0]] == ["user", "assistant", "user"]
    assert len(spoken.messages) == 4
    assert model.seen[-1].sampling.temperature == 0.25 and model.seen[-1].max_tokens == 9


def test_thinking(partner_of, capsys):
    model = FakeModel(script=lambda generation, choice: THOUGHT)
    spoken = talk(partner_of(model), "/think high", "2 + 2?")
    assert capsys.readouterr().out == "Let me see\n\nFour.\n"
    assert spoken.messages[-1] == {"role": "assistant", "content": "Four."}
    assert model.rendered[-1][2]["enable_thinking"] is True and model.rendered[-1][2]["reasoning_effort"] == "high"


def test_commands(partner_of, capsys):
    model = FakeModel()
    model.adapters = ["poet"]
    lines = ("/system Be brief", "/model poet", "Hi", "/retry", "/model", "/set top_p 0.5", "Hi", "/new", "Hi")
    spoken = talk(partner_of(model), *lines)
    assert len(model.rendered[1][0]) == 2 and len(model.rendered[2][0]) == 4 and len(model.rendered[3][0]) == 2
    assert model.rendered[0][0][0] == {"role": "system", "content": "Be brief"}
    assert model.seen[-1].adapter == "poet" and model.seen[-1].sampling.top_p == 0.5
    assert "[poet]" in capsys.readouterr().err and len(spoken.messages) == 2


@pytest.mark.parametrize("line", ["/model x", "/think x", "/set x 1", "/set top_p x", "/set top_p 7", "/x", "/retry"])
def test_wrong_commands_are_told(partner_of, capsys, line):
    model = FakeModel()
    spoken = talk(partner_of(model), line)
    assert line.split()[0] in capsys.readouterr().err and not model.seen and not spoken.messages


def test_errors_are_told_and_leave_no_turn(partner_of, capsys):
    model = FakeModel()
    model.refuse = Refused("the cache is full", 429)
    spoken = talk(partner_of(model), "Hi")
    assert "the cache is full" in capsys.readouterr().err and spoken.messages == []
    model.refuse, model.fail_after = None, 1
    spoken.run(iter(["Hi"]))
    assert "not numbers" in capsys.readouterr().err
    assert spoken.messages[-1] == {"role": "assistant", "content": "Hello"}


def test_ctrl_c_stops_the_answer(partner_of, capsys):
    model = FakeModel(script=lambda generation, choice: ["word "] * 10000)
    model.delay = 0.01
    partner = partner_of(model)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run in the background
    answer, said = partner.answer, threading.Event()

    async def watched(*args):
        async with aclosing(answer(*args)) as pieces:
            async for piece in pieces:
                yield piece
                said.set()

    def interrupt():
        said.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    partner.answer = watched
    person = threading.Thread(target=interrupt)
    person.start()
    try:
        spoken = talk(partner, "Go on")
    finally:
        person.join()
        signal.signal(signal.SIGINT, before)
    assert "stopped" in capsys.readouterr().err
    assert spoken.messages[-1]["content"].startswith("word") and len(spoken.messages) == 2
    wait_for(lambda: model.running == 0 and model.cancelled == 1)


def test_servers_that_do_not_answer(serve):
    with pytest.raises(ConfigError, match="no server answers"):
        Server("http://127.0.0.1:9", None)
    server = serve(FakeModel(), api_keys=("secret",))
    with pytest.raises(ConfigError, match="no API key"):
        Server(server.url, None)
    assert Server(server.url + "/v1/", "secret").names == ["fake"]
