"""What a probe finds at a URL, and which engine a name means."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llmq.cli.engine import find
from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.scheduler.settings import load_settings
from llmq.workers.engines.base import EngineLoad, EngineUnclear
from llmq.workers.engines.discovery import engine_from, find_engine
from llmq.workers.engines.http import HttpEngine
from llmq.workers.engines.probing import CUT_OFF
from llmq.workers.engines.sim import SimEngine
from tests.engine.fake import FakeEngine, chat, opened, page, sample


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine().serving() as server:
        yield server


@pytest.fixture
async def engine(fake: FakeEngine) -> AsyncIterator[HttpEngine]:
    async with opened(fake.url) as engine:
        yield engine


class TestProbe:
    """What is found at a URL."""

    @pytest.mark.parametrize(
        ("models", "pages", "kind", "slots"),
        [
            (sample("llamacpp-models")["body"], {"/slots": sample("llamacpp-slots")["body"]}, "llama.cpp", 2),
            (sample("vllm-models")["body"], {}, "vllm", None),
            ({"data": [{"id": "m", "owned_by": "me"}]}, {"/version": {"version": "0.32.0"}}, "vllm", None),
            ({"data": [{"id": "m", "owned_by": "sglang"}]}, {}, "sglang", None),
            ({"data": [{"id": "m"}]}, {"/get_model_info": {"model_path": "x"}}, "sglang", None),
            ({"data": [{"id": "m"}]}, {"/props": {"total_slots": 3}}, "llama.cpp", 3),
            ({"data": [{"id": "m", "owned_by": "library"}]}, {}, "openai", None),
            ({"data": []}, {}, "openai", None),
        ],
    )
    async def test_the_engine_is_recognised(
        self, fake: FakeEngine, engine: HttpEngine, models: Any, pages: dict[str, Any], kind: str, slots: int | None
    ) -> None:
        """By who owns its models, or by a page that only it has."""
        fake.replies |= {"/v1/models": page(200, models), **{path: page(200, body) for path, body in pages.items()}}

        info = await engine.probe()

        assert (kind, slots, fake.url) == (info.kind, info.slots, info.url)
        assert tuple(model["id"] for model in models["data"]) == info.models

    @pytest.mark.parametrize(
        ("owner", "pages", "continues"),
        [
            ("llamacpp", {"/apply-template": page(200, {"prompt": f"user: 1\nassistant: {CUT_OFF}"})}, "prefill"),
            ("llamacpp", {"/apply-template": page(200, {"prompt": f"assistant: {CUT_OFF}<|end|>assistant:"})}, None),
            ("llamacpp", {}, None),
            (
                "vllm",
                {"/tokenize": page(200, {"tokens": [1, 2]}), "/detokenize": page(200, {"prompt": f"x{CUT_OFF}"})},
                "continue_final_message",
            ),
            ("vllm", {"/tokenize": page(200, {"tokens": [1, 2]}), "/detokenize": page(200, {"prompt": "x"})}, None),
            ("vllm", {"/tokenize": page(400, {"error": {}})}, None),
        ],
    )
    async def test_whether_it_goes_on_with_an_answer_is_seen_in_its_prompt(
        self, fake: FakeEngine, engine: HttpEngine, owner: str, pages: dict[str, bytes], continues: str | None
    ) -> None:
        """Probed, never assumed: the prompt that it makes has to end with the text that was cut off."""
        fake.replies |= {"/v1/models": page(200, {"data": [{"id": "m", "owned_by": owner}]}), **pages}

        assert continues == (await engine.probe()).continues

    async def test_a_page_that_comes_in_pieces_is_read_whole(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """What a probe finds must not hang on how the network cuts a page."""
        whole = page(200, {"prompt": f"user: 1\nassistant: {CUT_OFF}"})

        async def dribble(writer: asyncio.StreamWriter) -> None:
            for begin in range(0, len(whole), 40):
                await asyncio.sleep(0.01)
                writer.write(whole[begin : begin + 40])
                await writer.drain()

        fake.replies |= {
            "/v1/models": page(200, {"data": [{"id": "m", "owned_by": "llamacpp"}]}),
            "/apply-template": dribble,
        }
        assert "prefill" == (await engine.probe()).continues

    @pytest.mark.parametrize(
        ("owner", "status", "has"), [("vllm", 200, True), ("vllm", 400, False), ("me", 200, False)]
    )
    async def test_whether_it_has_priorities_is_tried(
        self, fake: FakeEngine, engine: HttpEngine, owner: str, status: int, has: bool
    ) -> None:
        """vLLM without priority scheduling refuses any priority but 0; others are not asked."""
        fake.replies |= {
            "/v1/models": page(200, {"data": [{"id": "m", "owned_by": owner}]}),
            "/v1/completions": page(status, {}),
        }

        assert has == (await engine.probe()).prioritises

    async def test_transformers_is_an_engine_though_its_models_page_fails(
        self, fake: FakeEngine, engine: HttpEngine
    ) -> None:
        """As recorded: it lists its models from the hub, and has none without a network."""
        health = sample("transformers-health")
        fake.replies["/v1/models"] = page(500, sample("transformers-models")["body"])
        fake.replies["/health"] = page(200, health["body"], X_Request_Id=health["headers"]["x-request-id"])

        info = await engine.probe()

        assert ("transformers", ()) == (info.kind, info.models)

    @pytest.mark.parametrize(
        ("pages", "words"),
        [
            ({"/v1/models": page(404, {"detail": "Not Found"})}, "no /v1/models"),
            ({"/v1/models": page(200, b"<!doctype html>", Content_Type="text/html")}, "web page"),
            ({"/v1/models": page(404, b"<html>", Content_Type="text/html")}, "web page"),
            ({"/v1/models": page(401, sample("llamacpp-err-no-api-key")["body"])}, "without an API key"),
            ({"/v1/models": page(302, b"", Location="/login")}, "redirects"),
            ({"/v1/models": page(200, {"models": []})}, "OpenAI's form"),
            ({"/v1/models": page(503, "Loading model")}, "not ready"),
            ({"/health": page(503)}, "not ready"),
            ({"/v1/models": b"SSH-2.0-OpenSSH_9.6\r\n"}, "no HTTP answer"),
            ({"/v1/models": b""}, "no HTTP answer"),
        ],
    )
    async def test_what_is_no_engine_is_named(
        self, fake: FakeEngine, engine: HttpEngine, pages: dict[str, bytes], words: str
    ) -> None:
        """With what was found at the URL, and the next step."""
        fake.replies |= pages

        with pytest.raises(EngineUnavailable, match=words) as error:
            await engine.probe()

        assert fake.url in str(error.value)
        assert "\n" not in str(error.value)

    async def test_a_closed_port_is_named(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """Nobody listens there."""
        fake.stop_listening()

        with pytest.raises(EngineUnavailable, match=r"no engine answers at .*refused"):
            await engine.probe()

    async def test_a_wrong_key_is_named(self, fake: FakeEngine) -> None:
        """And never printed."""
        async with opened(fake.url, api_key="secret") as engine:
            fake.replies["/v1/models"] = page(401, {"error": {}})

            with pytest.raises(EngineUnavailable, match="this API key") as error:
                await engine.probe()

        assert "secret" not in str(error.value)

    async def test_a_slow_health_is_not_death_to_a_probe(
        self, fake: FakeEngine, engine: HttpEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Models are listed: that is enough."""
        monkeypatch.setattr("llmq.workers.engines.probing.EXTRA_TIMEOUT", 0.05)

        async def never(writer: asyncio.StreamWriter) -> None:
            await fake.hung_up.wait()

        fake.replies["/health"] = never
        assert ("m1",) == (await engine.probe()).models

    @pytest.mark.parametrize(
        ("metrics", "load"),
        [
            (
                [
                    'vllm:num_requests_running{engine="0"} 3.0',
                    'vllm:num_requests_waiting{engine="0"} 2.0',
                    'vllm:num_requests_running{engine="1"} 1.0',
                ],
                EngineLoad(4, 2),
            ),
            (["# HELP x", "llamacpp:requests_processing 2", "llamacpp:requests_deferred 5"], EngineLoad(2, 5)),
            (['sglang:num_running_reqs{model="m"} 7', 'sglang:num_queue_reqs{model="m"} 0'], EngineLoad(7, 0)),
            ([], EngineLoad()),
        ],
    )
    async def test_the_load_is_read_where_it_is_told(
        self, fake: FakeEngine, engine: HttpEngine, metrics: list[str], load: EngineLoad
    ) -> None:
        """Summed over the engines behind one server; an engine that tells nothing is no error."""
        fake.replies["/metrics"] = page(200, "\n".join(metrics))

        assert load == await engine.load()

    @pytest.mark.parametrize(
        "url",
        [
            "localhost:8000",
            "ftp://x",
            "http://",
            "http://h:99999",
            "http://h/?a=1",
            "http://u:p@h",
            "http://[::1",
            "//[a]",
        ],
    )
    def test_a_url_that_cannot_be_an_engines_is_refused(self, url: str) -> None:
        """With an example of one that can."""
        with pytest.raises(UsageError):
            HttpEngine(url)

    @pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
    def test_a_url_is_taken_with_or_without_v1(self, url: str) -> None:
        """Both are what people paste."""
        assert "http://h:1" == HttpEngine(url).url


class TestDiscovery:
    """From what a user names to an engine."""

    def test_a_name_is_read_by_its_form(self) -> None:
        """URLs and simulations."""
        assert isinstance(engine_from("sim"), SimEngine)
        assert isinstance(engine_from("sim://?slots=3"), SimEngine)
        assert isinstance(engine_from("https://h/v1"), HttpEngine)

    async def test_an_engine_that_hangs_is_given_up(self, fake: FakeEngine) -> None:
        """F-021: after `engine_idle_timeout`, in each way in which a command comes by an engine of HTTP."""

        async def hang(writer: asyncio.StreamWriter) -> None:
            await fake.hung_up.wait()

        fake.replies["/v1/chat/completions"] = hang
        given = {"engine": fake.url, "engine_idle_timeout": "50ms"}
        found = await find(load_settings(given, {}).settings)
        try:
            with pytest.raises(EngineUnclear, match="fell silent"):
                await found.engine.run(chat(model="m"))
        finally:
            await found.engine.close()

    @pytest.mark.parametrize("text", ["http://[::1", "sim://[::1"])
    def test_brackets_that_hold_no_address_are_refused(self, text: str) -> None:
        """With an example, and not with a stack trace."""
        with pytest.raises(UsageError, match=r"as in http://HOST|sim://\?"):
            engine_from(text)

    @pytest.mark.parametrize("text", ["", "localhost:8000", "simulated", "vllm"])
    def test_another_name_lists_the_forms(self, text: str) -> None:
        """So that nobody has to look them up."""
        with pytest.raises(UsageError, match=r"http\(s\)://HOST:PORT .*sim://"):
            engine_from(text)

    async def test_a_simulation_says_so(self) -> None:
        """Never a silent one."""
        found = await find_engine("sim")

        assert found.info.simulated
        assert "simulated" in found.note

    async def test_without_a_name_the_first_local_server_is_taken(self, fake: FakeEngine) -> None:
        """In the order of the ports, and it is said which."""
        port = int(fake.url.rpartition(":")[2])

        found = await find_engine(None, ports=[closed_port(), port])
        await found.engine.close()

        assert fake.url == found.info.url
        assert f"taking the openai engine at {fake.url} (m1)" == found.note

    async def test_no_server_is_an_error_that_names_the_choices(self, fake: FakeEngine) -> None:
        """Never a silent simulation; what stands there without being an engine is named."""
        fake.replies["/v1/models"] = page(404, {})
        ports = [closed_port(), int(fake.url.rpartition(":")[2])]

        with pytest.raises(EngineUnavailable, match=r"--engine http.*sim") as error:
            await find_engine(None, ports=ports)

        assert f"{fake.url} answers, but has no /v1/models" in str(error.value)
        assert f"{ports[0]} " not in str(error.value).partition("\n")[2]


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
