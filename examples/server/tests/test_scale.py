"""Two replicas of Ray Serve: the same texts, conversations that stay, and a replica that dies."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time

import httpx
import openai
import psutil
import pytest
from servers import PROMPTS

pytestmark = pytest.mark.scale
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def model(llama):
    command = ["serve", "run", "rope_server.scale:app", f"folder={llama.folder}"]
    with subprocess.Popen(command) as running:
        try:
            while not is_served():
                assert running.poll() is None
                time.sleep(1)
            yield llama.folder.name
        finally:
            running.send_signal(signal.SIGINT)


def is_served():
    try:
        return httpx.get(f"{URL}/health").status_code == 200
    except httpx.TransportError:
        return False


async def answers(model, retries, **fields):
    """Return the texts of all prompts at once; None where a request was lost."""
    client = openai.AsyncOpenAI(
        base_url=f"{URL}/v1", api_key="none", max_retries=retries, timeout=60
    )

    async def answer(index, prompt):
        try:
            found = await client.completions.create(
                model=model, prompt=prompt, seed=index, **fields
            )
        except openai.APIError:
            return None
        return found.choices[0].text

    async with client:
        return await asyncio.gather(*(answer(*pair) for pair in enumerate(PROMPTS)))


def replicas():
    """Return the processes of the replicas."""
    named = psutil.process_iter(["cmdline"])
    return [x for x in named if x.info["cmdline"] and "ServeReplica" in x.info["cmdline"][0]]


def shared_tokens():
    """Return the prompt tokens that one of the replicas did not compute again."""
    lines = httpx.get(f"{URL}/metrics").text.splitlines()
    name = "rope_server_shared_tokens_total "
    return next(float(line.split()[1]) for line in lines if line.startswith(name))


def test_a_named_prefix_stays_with_its_replica(model):
    body = {"model": model, "prompt": "A prefix that many requests have.", "max_tokens": 1}
    headers = {"serve_multiplexed_model_id": "conversation"}
    for _ in range(20):
        httpx.post(f"{URL}/v1/completions", json=body, headers=headers, timeout=60)
        time.sleep(0.1)  # Ray tells its routers a little later
    # The first tokens are on one full page of 16 at least; other replicas have none of them.
    found = {shared_tokens() for _ in range(50)}
    assert max(found) >= 16 * 17
    assert min(found) <= 16 * 2


def test_a_replica_that_dies(model):
    fields = {"max_tokens": 40, "temperature": 0.8}
    expected = asyncio.run(answers(model, 0, **fields))
    assert None not in expected
    before = replicas()
    assert len(before) == 2

    async def killed():
        running = asyncio.ensure_future(answers(model, 1, **fields))
        await asyncio.sleep(1)
        assert not running.done()
        before[0].kill()
        return await running

    assert asyncio.run(killed()) == expected
