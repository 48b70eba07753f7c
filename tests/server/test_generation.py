"""Completions and chats through OpenAI's client: the engine's own tokens, whole and in parts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from lora_moe_jax import SamplingParams
from lora_moe_jax.server.replies import event
from tests.server.conftest import LOADED, PROMPT

MESSAGES = [{"role": "user", "content": "read the file"}]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=True)
MODELS = {"pocket": None, "shout": "shout", "pocket:tester": "tester"}


def complete(client, model="pocket", **settings):
    settings = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0} | settings
    return client.completions.create(model=model, **settings)


def chat(client, model="pocket", **settings):
    settings = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0} | settings
    return client.chat.completions.create(model=model, **settings)


@pytest.mark.parametrize("model", MODELS)
def test_completions_are_the_engines(client, engine, model):
    got = complete(client, model, logprobs=1)
    (expected,) = engine.generate([PROMPT], GREEDY, [MODELS[model]])
    (choice,) = got.choices
    assert got.model == model and got.object == "text_completion"
    assert choice.text == expected.text
    assert choice.finish_reason == expected.finish_reason == "length"
    assert choice.logprobs.token_logprobs == expected.logprobs
    tokens = choice.logprobs.tokens
    assert "".join(tokens) == choice.text
    assert choice.logprobs.text_offset == [len("".join(tokens[:i])) for i in range(12)]
    assert choice.logprobs.top_logprobs == [
        {token: logprob} for token, logprob in zip(tokens, expected.logprobs, strict=True)
    ]
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert got.usage.completion_tokens == 12


def test_adapters_differ(client):
    assert len({complete(client, model).choices[0].text for model in ("pocket", *LOADED)}) == 4


def test_priorities(client, running, monkeypatch):
    """As vLLM takes them; they change the order, and no text."""
    seen, stream = [], running.stream

    async def watched(prompts, params, adapters, priority):
        seen.append(priority)
        return await stream(prompts, params, adapters, priority)

    monkeypatch.setattr(running, "stream", watched)
    text = complete(client).choices[0].text
    assert complete(client, extra_body={"priority": -3}).choices[0].text == text
    assert chat(client, extra_body={"priority": 7}).choices[0].message.content
    assert seen == [0, -3, 7]


@pytest.mark.parametrize("model", MODELS)
def test_chats_are_the_engines(client, engine, model):
    got = chat(client, model, logprobs=True, top_logprobs=1)
    (expected,) = engine.generate([engine.chat(MESSAGES)], GREEDY, [MODELS[model]])
    (choice,) = got.choices
    assert choice.message.role == "assistant" and choice.message.content == expected.text
    assert [entry.logprob for entry in choice.logprobs.content] == expected.logprobs
    assert b"".join(bytes(e.bytes) for e in choice.logprobs.content).decode() == expected.text
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_most_likely_tokens(client, engine, temperature):
    """In both interfaces, streamed and whole, as the engine has them."""
    settings = {"temperature": temperature, "seed": 3}
    params = SamplingParams(max_tokens=12, temperature=float(temperature), seed=3, logprobs=4)

    def text(token: int) -> str:
        return engine.codec.tokenizer.decode([token], skip_special_tokens=False)

    got = complete(client, logprobs=4, **settings).choices[0].logprobs
    (expected,) = engine.generate([PROMPT], params)
    tops = zip(expected.top_logprobs, expected.token_ids, expected.logprobs, strict=True)
    for found, (top, token, logprob) in zip(got.top_logprobs, tops, strict=True):
        assert found.items() >= {text(t): value for t, value in reversed(top)}.items()
        assert text(token) in found and len(found) in (4, 5)
        assert all(found[text(t)] >= value for t, value in [*top, (token, logprob)])
    streamed = complete(client, logprobs=4, stream=True, **settings)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [each for part in parts if part for each in part.top_logprobs] == got.top_logprobs

    got = chat(client, logprobs=True, top_logprobs=4, **settings).choices[0].logprobs.content
    (expected,) = engine.generate([engine.chat(MESSAGES)], params)
    assert [[(entry.token, entry.logprob) for entry in place.top_logprobs] for place in got] == [
        [(text(t), value) for t, value in top] for top in expected.top_logprobs
    ]
    plain = chat(client, logprobs=True, **settings).choices[0].logprobs.content
    assert [place.logprob for place in plain] == expected.logprobs
    assert all(place.top_logprobs == [] for place in plain)


def test_a_chat_goes_on_to_the_end_of_the_cache(client, engine):
    got = chat(client, max_tokens=None, extra_body={"ignore_eos": True})
    assert got.usage.total_tokens == engine.options.max_length
    assert chat(client, max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3


def test_text_parts_are_joined(client):
    parts = [{"type": "text", "text": "read "}, {"type": "text", "text": "the file"}]
    got = chat(client, messages=[{"role": "user", "content": parts}])
    assert got.choices[0].message.content == chat(client).choices[0].message.content


def test_where_tokens_are_does_not_depend_on_stop_strings(client):
    """Text that may become one is held back, and has its place all the same."""
    plain = complete(client, "shout", logprobs=0).choices[0]
    held = complete(client, "shout", logprobs=0, stop=[plain.text[1:] + "x"]).choices[0]
    assert held.text == plain.text and held.logprobs == plain.logprobs


def test_streamed_completions_join_to_the_whole(client):
    prompts = [PROMPT, "import os\n"]
    whole = complete(client, "shout", prompt=prompts, logprobs=0)
    texts, tokens, offsets, reasons = ["", ""], [[], []], [[], []], {}
    usage = None
    for chunk in complete(
        client, "shout", prompt=prompts, logprobs=0, stream=True, **include_usage()
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert reasons == {0: "length", 1: "length"}
    assert usage == whole.usage


def test_streamed_chats_join_to_the_whole(client):
    chunks = list(chat(client, "tester", stream=True, **include_usage()))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    whole = chat(client, "tester")
    text = "".join(c.choices[0].delta.content for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_a_streams_last_event_is_done(http):
    body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 2, "stream": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\ndata: [DONE]\n\n") and '"usage"' not in answer.text


def test_prompts_as_token_ids(client, engine):
    ids = engine.codec.encode(PROMPT)
    text = complete(client).choices[0].text
    assert complete(client, prompt=ids).choices[0].text == text
    both = complete(client, prompt=[ids, ids[:3]])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == text
    assert both.usage.prompt_tokens == len(ids) + 3


def test_choices_are_repeatable_samples(client, engine):
    settings = {"n": 3, "temperature": 1.0, "seed": 2**32 - 1}
    got = complete(client, prompt=[PROMPT, "import os\n"], **settings)
    assert [choice.index for choice in got.choices] == list(range(6))
    texts = [choice.text for choice in got.choices]
    assert len(set(texts[:3])) == 3
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (2**32 - 1, 0, 1)]
    assert texts[:3] == [one.text for one in engine.generate([PROMPT] * 3, params)]
    prompt_tokens = sum(len(engine.codec.encode(prompt)) for prompt in (PROMPT, "import os\n"))
    assert got.usage.prompt_tokens == prompt_tokens


def test_stop_strings_and_extensions(client, engine):
    text = complete(client).choices[0].text
    stop = text[4:7]
    got = complete(client, stop=stop)
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].text == text[: text.index(stop)]
    (expected,) = engine.generate([PROMPT], GREEDY)
    ending = {"stop_token_ids": [expected.token_ids[3]]}
    assert complete(client, extra_body=ending).usage.completion_tokens <= 4
    first = {"top_k": 1, "min_p": 0.5, "ignore_eos": True}
    assert complete(client, temperature=1, extra_body=first).choices[0].text == text
    seeded = {"temperature": 1, "seed": 7}
    text = complete(client, **seeded).choices[0].text
    assert complete(client, **seeded, extra_body={"top_k": -1}).choices[0].text == text
    assert complete(client, **seeded | {"seed": 7 - 2**63}).choices[0].text == text


def test_many_at_once_are_as_each_alone(client):
    models = ("pocket", *LOADED) * 3
    prompts = [PROMPT, "import os\n", "class A:\n"]
    wanted = [(model, prompts[i // 4]) for i, model in enumerate(models)]
    alone = [complete(client, model, prompt=prompt).choices[0].text for model, prompt in wanted]
    with ThreadPoolExecutor(len(wanted)) as threads:
        jobs = [threads.submit(complete, client, model, prompt=p) for model, p in wanted]
    assert [job.result().choices[0].text for job in jobs] == alone


def test_models(client):
    models = list(client.models.list())
    assert [model.id for model in models] == ["pocket", *LOADED]
    assert [model.parent for model in models] == [None, "pocket", "pocket", "pocket"]
    assert client.models.retrieve("shout").parent == "pocket"
    assert client.models.retrieve("pocket:shout").id == "shout"
    assert client.models.retrieve("pocket").parent is None


@pytest.mark.parametrize("model", ["nobody", "pocket:nobody", "shout:pocket", "", "POCKET"])
def test_unknown_models(client, model):
    for call in (complete, chat):
        with pytest.raises(openai.NotFoundError) as error:
            call(client, model)
        assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_a_model_that_does_not_exist_has_no_entry(client):
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def include_usage() -> dict:
    return {"stream_options": {"include_usage": True}}


def test_an_event_is_two_lines_for_every_client():
    text = "a\u2028b\x85c\nd"
    sent = event({"text": text})
    assert sent.splitlines() == [sent.rstrip("\n"), ""]
    assert json.loads(sent.removeprefix("data: ")) == {"text": text}
