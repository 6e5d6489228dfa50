"""What a server may answer that is no answer: one sentence each, and nothing enters a batch."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from http_thread import served
from sections import make_executor
from sglang_stand_in import StandIn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from subjects import DIMS, attached, embedded, policy, server_settings

from pentad.core.errors import InfraFailure, RunError, UserError
from pentad.core.types import Prompt, Request, SamplingParams
from pentad.models.hf_weights import iter_hf
from pentad.ops.digest import digest_of
from pentad.rollout.workflows import SingleTurn
from pentad.samplers import sglang, vllm
from pentad.sync.group import PROTOCOL

GENERATE = "/inference/v1/generate"
WEIGHTS = list(iter_hf(policy(1)))


class ScriptedVllm:
    """Speaks vLLM's endpoints; `answer` plays generations, the rest may be spoilt by `says`."""

    def __init__(self, answer=None, **says) -> None:
        self.answer = answer or (lambda body: good(body))
        self.label = "default"
        self.held: dict[str, str] = {}
        self.num_asked = 0
        config = {
            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 1024},
            "parallel_config": {"worker_extension_cls": vllm.EXTENSION, "world_size": 1},
            "device_config": {"device": "cpu"},
        }
        for key, change in says.pop("config", {}).items():
            config[key] |= change
        self.says = {
            "/version": {"version": "0.32.0"},
            "/server_info": {"vllm_config": config},
            "/health": None,
            "/pause": {},
            "/resume": {},
            "/reset_prefix_cache": {"success": True},
            "/abort_requests": {},
            **says,
        }

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self.handle, methods=["GET", "POST"])])

    async def handle(self, request: HttpRequest) -> Response:
        path = request.url.path
        body = json.loads(await request.body() or b"{}")
        if path == GENERATE:
            if not body:
                return self.says.get(GENERATE) or JSONResponse({}, status_code=400)
            self.num_asked += 1
            told = self.answer(body)
            return told if isinstance(told, Response) else JSONResponse(told)
        if path in self.says:
            told = self.says[path]
            return told if isinstance(told, Response) else JSONResponse(told)
        if path == "/collective_rpc":
            receipts = {
                "pentad_about": {"protocol": PROTOCOL, "label": self.label},
                "pentad_held": {"held": self.held},
                "pentad_load_file": {"num_tensors": len(WEIGHTS), "digest": "d" * 32},
            }
            if body["method"] == "pentad_label":
                (self.label,) = body["args"]
                return JSONResponse({"results": [{"label": self.label}]})
            return JSONResponse({"results": [receipts[body["method"]]]})
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return JSONResponse({"success": True})
        assert path == "/weight_info", path
        return JSONResponse({"weight_version": self.label})


def good(body, **changes) -> dict:
    num = body["sampling_params"]["max_tokens"]
    ids = changes.pop("token_ids", [(7 * t) % 41 for t in range(num)])
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": i, "logprob": -0.5} for i in ids]},
        "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}],
    }
    return {"choices": [choice | changes]}


def logprobs(values) -> dict:
    ids = [(7 * t) % 41 for t in range(4)]
    pairs = zip(ids, values, strict=False)
    return {"content": [{"token_id": i, "logprob": value} for i, value in pairs]}


def versions(spans):
    keys = ("version", "start", "end")
    return spoilt(weight_versions=[dict(zip(keys, span, strict=True)) for span in spans])


def spoilt(**changes):
    return lambda body: good(body, **changes)


def raw(text: str):
    """As other programs write JSON: NaN and all."""
    return Response(text, media_type="application/json")


@asynccontextmanager
async def over(script: ScriptedVllm, folder, **changes) -> AsyncIterator:
    with served(script.app()) as address:
        sampler = await vllm.attach(address, server_settings(folder, **changes))
        try:
            yield sampler
        finally:
            await sampler.close()


ENDING = SamplingParams(max_new_tokens=4, stop_ids=(40,))
ASKED = Request(id="a", prompt_ids=(1, 2), params=ENDING, seeds=(5,))
ASK = {"sampling_params": {"max_tokens": 4}}


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda _: PlainTextResponse("<html>oops"), "answered no JSON"),
        (lambda _: raw("[1, 2]"), "invalid answer"),
        (lambda _: {}, "invalid answer \\(choices: Field required"),
        (lambda _: {"choices": []}, "0 choices came where 1 was requested"),
        (lambda _: JSONResponse({"why": "busy"}, status_code=503), "answered 503"),
        (lambda _: {"error": {"message": "engine died"}}, "engine died"),
        (spoilt(logprobs=None), "0 log-probs came for 4 tokens"),
        (spoilt(logprobs=logprobs([-1.0] * 3)), "3 log-probs came for 4 tokens"),
        (spoilt(token_ids=[1, 2, 3, 4], logprobs=logprobs([-1.0] * 4)), "or for other tokens"),
        (lambda b: raw(json.dumps(good(b, logprobs=logprobs([float("nan")] * 4)))), "log-prob nan"),
        (spoilt(logprobs=logprobs([-9999.0] * 4)), "a sampled token has no log-prob"),
        (spoilt(logprobs=logprobs([0.5] * 4)), "log-prob 0.5 is not a finite number of at most 0"),
        (spoilt(token_ids=[1, 2, 3, 41]), "id 41 is outside the vocabulary of 41"),
        (spoilt(token_ids=[-1, 2, 3, 4]), "invalid answer"),
        (spoilt(token_ids=[1] * 5), "5 tokens came where 1 to 4 were requested"),
        (spoilt(token_ids=[]), "0 tokens came"),
        (spoilt(finish_reason="repetition"), "ended by 'repetition'"),
        (spoilt(weight_versions=None), "does not report which weights"),
        (
            spoilt(weight_versions=[{"version": "2", "start": 0, "end": 4}]),
            "weights of version 2 drew a token, the server was given 3",
        ),
        (
            spoilt(weight_versions=[{"version": "default", "start": 0, "end": 4}]),
            "weights 'default' sampled tokens 0 to 4, which were never installed",
        ),
        (
            spoilt(weight_versions=[{"version": "3", "start": 0, "end": 2}]),
            "2 versions came for 4 tokens",
        ),
        (versions([("3", 0, 10**12)]), "which were never installed"),  # not as many in memory
        (versions([("3", 0, 2), ("3", 1, 4)]), "which were never installed"),
        (versions([("3", 0, 4), ("3", 4, 2)]), "which were never installed"),
        (versions([("4", 0, 4)]), "version 4 drew a token, the server was given 3"),
        (versions([("3.0", 0, 4)]), "weights '3.0' sampled tokens"),
        (versions([("9" * 5000, 0, 4)]), "which were never installed"),
        (lambda _: raw("[" * 100_000), "answered no JSON"),
        (
            lambda _: {"choices": [good(ASK)["choices"][0]] * 2},
            "2 choices came where 1 was requested",
        ),
        (spoilt(token_ids=[10**30, 1, 2, 3]), "outside the vocabulary"),
        (lambda b: raw(json.dumps(good(b, logprobs=logprobs([-1e999] * 4)))), "no log-prob"),
        (spoilt(finish_reason="stop"), "it stopped at id 21, which ends no answer"),
        (spoilt(token_ids=[1, 40, 2, 3]), "it continued after token 1, id 40, a stop token"),
        (spoilt(token_ids=[1, 2]), "it was cut after 2 of 4 tokens"),
        (spoilt(finish_reason=None), "ended by None"),
        (
            lambda _: Response(b"\x1f\x8bno", headers={"content-encoding": "gzip"}),
            "answered no JSON",
        ),
        (lambda _: Response(b"\xff\xfe", media_type="application/json"), "answered no JSON"),
    ],
)
def test_an_answer_that_is_none_is_refused_with_a_sentence(model_folder, answer, sentence):
    async def main():
        async with over(ScriptedVllm(answer), model_folder) as sampler:
            await sampler.install(3, WEIGHTS)
            with pytest.raises(InfraFailure, match=sentence) as caught:
                await sampler.generate(ASKED)
            assert "vLLM at http://127.0.0.1:" in str(caught.value)
            assert sampler.stats()["tokens_drawn"] == 0 and not sampler.open

    asyncio.run(main())


def config(**changes):
    return {"config": changes}


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"/version": {"version": "0.24.1"}}, "is vLLM 0.24.1, .*; use 0.25 or later"),
        (
            {"/server_info": PlainTextResponse("no", status_code=404)},
            "cannot be replaced; start it with VLLM_SERVER_DEV_MODE=1",
        ),
        (
            config(parallel_config={"worker_extension_cls": ""}),
            "cannot receive weights; start it with --worker-extension-cls pentad",
        ),
        (config(model_config={"max_model_len": 64}), "64 tokens, the run needs 1024"),
        ({GENERATE: JSONResponse({}, status_code=403)}, "start it with --enable-scale-out"),
        (
            {"/collective_rpc": {"results": [{"protocol": 0}]}},
            "another version of Pentad",
        ),
    ],
)
def test_a_server_that_lacks_something_is_not_attached_to(model_folder, says, sentence):
    async def main():
        async with over(ScriptedVllm(**says), model_folder):
            pass

    with pytest.raises(UserError, match=sentence) as caught:
        asyncio.run(main())
    assert "rollout.server.addresses = http://127.0.0.1:" in str(caught.value)


def test_raw_logprobs_are_no_use_at_another_temperature(model_folder):
    says = config(model_config={"logprobs_mode": "raw_logprobs"})

    async def main():
        async with over(ScriptedVllm(**says), model_folder) as sampler:
            await sampler.install(3, WEIGHTS)
            warm = SamplingParams(max_new_tokens=4, temperature=0.7)
            request = Request(id="b", prompt_ids=(1,), params=warm, seeds=(1,))
            with pytest.raises(UserError, match="start it with --logprobs-mode processed_logprobs"):
                await sampler.generate(request)
            return await sampler.generate(ASKED)

    assert len(asyncio.run(main())[0].ids) == 4


def test_nobody_at_the_address_is_one_sentence(model_folder):
    with pytest.raises(RunError, match="vLLM at http://127.0.0.1:9: /version failed"):
        asyncio.run(vllm.attach("http://127.0.0.1:9", server_settings(model_folder)))


def test_a_server_that_was_started_anew_is_not_well(model_folder):
    script = ScriptedVllm()

    async def main():
        async with over(script, model_folder) as sampler:
            await sampler.install(3, WEIGHTS)
            await sampler.health()
            script.label = "default"
            with pytest.raises(RunError, match="holds weights 'default', not version 3"):
                await sampler.health()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/collective_rpc", {"results": [{"protocol": PROTOCOL, "error": "no memory"}]}),
        ("/update_weight_version", PlainTextResponse("no", status_code=500)),
    ],
)
def test_after_a_failed_install_nothing_is_served(model_folder, path, told):
    script = ScriptedVllm()

    async def main():
        async with over(script, model_folder) as sampler:
            await sampler.install(3, WEIGHTS)
            script.says[path] = told
            with pytest.raises(RunError, match="its weights are unknown"):
                await sampler.install(4, WEIGHTS)
            for call in (sampler.health(), sampler.generate(ASKED)):
                with pytest.raises(RunError, match="its weights are unknown"):
                    await call
            del script.says[path]
            await sampler.install(4, WEIGHTS)  # which heals it
            await sampler.health()

    asyncio.run(main())


def test_the_receipt_is_the_workers_not_ours(model_folder):
    async def main():
        async with over(ScriptedVllm(), model_folder) as sampler:
            return await sampler.install(3, WEIGHTS)

    receipt = asyncio.run(main())
    assert receipt.digest == "d" * 32 != digest_of(WEIGHTS).hex()


def test_a_vllm_that_names_no_weights_is_cut_while_it_takes_new_ones(model_folder):
    """0.25: what was drawn before the cut is of the old weights, the rest of the new ones."""
    asked, paused = [], asyncio.Event()

    class Script(ScriptedVllm):
        async def handle(self, request):
            if request.url.path == "/pause" and request.query_params["mode"] == "abort":
                loop.call_soon_threadsafe(paused.set)
            body = json.loads(await request.body() or b"{}")
            if request.url.path != GENERATE or not body:
                return await super().handle(request)
            asked.append(body)
            if len(asked) == 1:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(paused.wait(), loop))
                return JSONResponse(old(body, [3, 4, 5], "abort"))
            return JSONResponse(old(body, [6] * body["sampling_params"]["max_tokens"], "length"))

    def old(body, ids, finish):
        told = [{"token": f"token_id:{i}", "logprob": -0.5} for i in ids]
        choice = {"token_ids": ids, "logprobs": {"content": told}, "finish_reason": finish}
        return {"choices": [choice]}

    async def main():
        nonlocal loop
        loop = asyncio.get_running_loop()
        request = replace(ASKED, params=SamplingParams(max_new_tokens=8))
        async with over(Script(**{"/version": {"version": "0.25.1"}}), model_folder) as sampler:
            await sampler.install(3, WEIGHTS)
            task = asyncio.create_task(sampler.generate(request))
            while not asked:
                await asyncio.sleep(0.01)
            await sampler.install(4, WEIGHTS)
            await sampler.health()
            return await task

    loop = None
    (answer,) = asyncio.run(main())
    assert answer.ids == [3, 4, 5, 6, 6, 6, 6, 6] and answer.finish == "length"
    assert answer.versions == [3] * 3 + [4] * 5
    assert asked[1]["token_ids"] == [1, 2, 3, 4, 5]
    assert asked[1]["sampling_params"]["max_tokens"] == 5
    assert asked[0]["sampling_params"]["seed"] != asked[1]["sampling_params"]["seed"]
    assert [body["cache_salt"] for body in asked] == ["pentad-3", "pentad-4"]


def groups_over(samplers, tokenizer=None):
    settings = {
        "params": SamplingParams(max_new_tokens=4),
        "num_samples": 2,
        "run_seed": 1,
        "vocab_size": DIMS.vocab_size,
        "replica_patience_s": 2.0,
        "replica_backoff_s": 0.01,
    }

    class Text:
        eos_token_id = 0

        def decode(self, ids, **_):
            return " ".join(map(str, ids))

    class Same:
        async def score(self, group):
            for sample in group.samples:
                sample.reward = 1.0
            return group

    return make_executor(samplers, SingleTurn(), Same(), tokenizer or Text(), **settings)


def test_a_server_that_dies_in_a_request_is_replaced_by_another(model_folder):
    """The executor takes it for a failure of the machinery: same seeds, other replica."""

    def cut(_body):
        async def parts():
            yield b'{"choices": ['
            raise ConnectionError("gone")

        return StreamingResponse(parts(), media_type="application/json")

    broken, whole = ScriptedVllm(cut), ScriptedVllm()

    async def main():
        async with over(broken, model_folder) as one, over(whole, model_folder) as other:
            for sampler in (one, other):
                await sampler.install(3, WEIGHTS)
            executor = groups_over({"one": one, "other": other})
            return await asyncio.gather(
                *(executor.rollout(Prompt(gid, (1, gid), {}), 0) for gid in range(8))
            )

    groups = asyncio.run(main())
    assert len(groups) == 8 and all(len(g.samples) == 2 for g in groups)
    assert broken.num_asked > 0
    assert whole.num_asked == 16


def test_another_replica_draws_the_same_tokens_for_a_group(model_folder):
    """Seeds are those of the group."""

    async def main():
        settings, groups = server_settings(model_folder), []
        for _ in range(2):
            stand_in = StandIn(lambda: embedded(9, -1))
            with served(stand_in.app()) as here:
                async with attached(sglang.attach, here, settings) as sampler:
                    executor = groups_over({"one": sampler})
                    groups.append(await executor.rollout(Prompt(0, (1, 2), {}), 0))
        return groups

    ids = [[s.ids.tolist() for s in group.samples] for group in asyncio.run(main())]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("info", "sentence"),
    [
        ({"version": "0.5.2"}, "is SGLang 0.5.2, .*; use 0.5.17 or later"),
        ({"context_length": 64}, "64 tokens, the run needs 1024"),
    ],
)
def test_an_sglang_that_lacks_something_is_not_attached_to(model_folder, info, sentence):
    stand_in = StandIn(lambda: embedded(9, -1), **info)
    with served(stand_in.app()) as address, pytest.raises(UserError, match=sentence):
        asyncio.run(sglang.attach(address, server_settings(model_folder)))


def test_sglang_says_what_it_can(model_folder):
    stand_in = StandIn(
        lambda: embedded(9, -1), enable_memory_saver=False, enable_deterministic_inference=False
    )

    async def main():
        sampler = await sglang.attach(address, server_settings(model_folder))
        await sampler.close()
        return sampler.capabilities

    with served(stand_in.app()) as address:
        assert asyncio.run(main()) == {"pause", "abort", "stop_strings"}


def test_sglang_prefixes_are_kept_apart_by_version(model_folder):
    stand_in = StandIn(lambda: embedded(9, -1))

    async def main():
        async with attached(sglang.attach, address, server_settings(model_folder)) as sampler:
            await sampler.generate(ASKED)
            await sampler.install(1, list(iter_hf(policy(2))))
            await sampler.generate(ASKED)

    with served(stand_in.app()) as address:
        asyncio.run(main())
    assert stand_in.extra_keys == ["pentad-0", "pentad-1"]


def test_sglang_ends_at_the_ids_it_was_given_and_at_no_other(model_folder):
    """Its model's own end of text is none of them: the answer goes on there."""

    async def main():
        async with attached(sglang.attach, address, server_settings(model_folder)) as sampler:
            ending = SamplingParams(max_new_tokens=60, stop_ids=(40,))
            request = replace(ASKED, params=ending, seeds=tuple(range(8)))
            return await sampler.generate(request)

    stand_in = StandIn(lambda: embedded(9, -1), eos_ids=tuple(range(0, 40, 5)))
    with served(stand_in.app()) as address:
        answers = asyncio.run(main())
    assert len(stand_in.extra_keys) > len(answers), "no answer met an end of text"
    for answer in answers:
        assert 40 not in answer.ids[:-1]
        is_end = answer.ids[-1] == 40
        assert answer.finish == ("stop" if is_end else "length") and (
            is_end or len(answer.ids) == 60
        )


def test_an_sglang_that_does_not_fall_asleep_goes_on_serving(model_folder):
    """To wake a server that is awake would end it."""

    class Sleepless(StandIn):
        async def flush(self) -> Response:
            return PlainTextResponse("requests are under way", status_code=400)

    async def main():
        async with attached(sglang.attach, address, server_settings(model_folder)) as sampler:
            with pytest.raises(InfraFailure, match="/flush_cache answered 400"):
                await sampler.sleep()
            await sampler.wake()
            return await sampler.generate(ASKED)

    with served(Sleepless(lambda: embedded(9, -1)).app()) as address:
        assert all(answer.ids for answer in asyncio.run(main()))
