"""A server in a process of its own, and prompts for it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import httpx
import openai
import psutil

PROMPTS = [f"Prompt {index}: " + "word " * (index % 37) for index in range(200)]


class Running:
    """A server in a process of its own, on a free port; source: a folder, or --demo."""

    def __init__(self, source, *options):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        command = [sys.executable, "-m", "rope_server", str(source), "--port", str(self.port)]
        self.process = subprocess.Popen([*command, *options])
        self.url = f"http://127.0.0.1:{self.port}"
        # Without a pool, whose idle connections would count among the server's files.
        no_pool = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=300)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=no_pool
        )
        self._wait_for(self._answers, 300)
        self.model = self.openai.models.list().data[0].id

    def _answers(self):
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.ConnectError:
            if self.process.poll() is not None:
                raise RuntimeError("the server has ended") from None
            return False

    def _wait_for(self, condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.05)

    def wait_until_idle(self):
        """Wait until no page has a user."""
        self._wait_for(lambda: max(httpx.get(f"{self.url}/pages").json()) <= 0, 60)

    def resources(self):
        """Return the numbers of threads and files, and the memory, when no client is connected."""
        self.wait_until_idle()
        process = psutil.Process(self.process.pid)
        self._wait_for(lambda: len(process.net_connections()) == 1, 60)
        return (process.num_threads(), process.num_fds()), process.memory_info().rss

    def metric(self, name):
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(x.split()[1]) for x in lines if x.startswith(f"rope_server_{name} "))

    def complete(self, prompt, **fields):
        return self.openai.completions.create(model=self.model, prompt=prompt, **fields)

    def post(self, path="/v1/completions", **fields):
        body = {"model": self.model, **fields}
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def end(self):
        self.process.terminate()
        return self.process.wait(60)
