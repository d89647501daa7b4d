"""vLLM servers and their clients for tests: started as processes, asked over HTTP, stopped with all their children."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from chunks.redis_server import free_port, redis_is_here

from kvfoundry.integrations.vllm.serving import Serving
from kvfoundry.integrations.vllm.settings import connector_settings

# For modules whose tests start servers.
needs_vllm = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm"),
    pytest.mark.skipif(not redis_is_here(), reason="redis-server is not installed"),
]
# A server that is not up after so many seconds has failed.
_START = 600


@dataclass(frozen=True)
class Answer:
    """first: seconds to the first token; cached: prompt tokens that vLLM says were not computed."""

    text: str
    prompt_tokens: int
    cached: int
    first: float
    logprobs: dict[str, float]


class Server:
    """`vllm serve` of a model folder. settings: of the connector; None serves without one."""

    def __init__(self, model: Path, log: Path, settings: dict[str, Any] | None, *more: str, dtype: str = "float32"):
        self.port, self.log = free_port(), log
        words = [] if settings is None else Serving(str(model), connector_settings(settings)).arguments[3:]
        # the CPU build's own command `vllm` does not start: it looks for a package of another name
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words]
        words += ["--port", str(self.port), "--host", "127.0.0.1", "--dtype", dtype, "--served-model-name", "model"]
        words += ["--max-model-len", "4096", "--enforce-eager", "--enable-prompt-tokens-details", *more]
        if "--enable-prefix-caching" not in more:
            words += ["--no-enable-prefix-caching"]
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        env.pop("TRITON_INTERPRET", None)
        self._out = log.open("ab")
        self.process = subprocess.Popen(words, stdout=self._out, stderr=self._out, env=env, start_new_session=True)
        try:
            self._await()
            self.ask("A first request makes what every server makes once.", 2)
        except BaseException:  # a server that nobody holds would run on
            self.stop()
            raise

    def _await(self) -> None:
        end = time.monotonic() + _START
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM ended: {self.log.read_text()[-3000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=2):
                return
            time.sleep(0.5)
        raise RuntimeError(f"vLLM did not come up: {self.log.read_text()[-3000:]}")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def client(self) -> Any:
        """One openai client, for any number of threads."""
        import openai

        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", timeout=600, max_retries=0)

    def ask(self, prompt: str | list[int], tokens: int = 16, logprobs: int | None = 20, **more: Any) -> Answer:
        """One greedy completion through the openai client, as a stream. logprobs: how many of the first token's."""
        began, first, text, usage, top = time.perf_counter(), 0.0, "", None, {}
        stream = self.client.completions.create(
            model="model", prompt=prompt, max_tokens=tokens, temperature=0, stream=True, logprobs=logprobs,
            stream_options={"include_usage": True}, extra_body=more or None,
        )  # fmt: skip
        for part in stream:
            usage = part.usage or usage
            for choice in part.choices:
                first = first or time.perf_counter() - began
                text += choice.text
                if not top and choice.logprobs is not None and choice.logprobs.top_logprobs:
                    top = dict(choice.logprobs.top_logprobs[0])
        details = usage.prompt_tokens_details
        return Answer(text, usage.prompt_tokens, (details.cached_tokens or 0) if details else 0, first, top)

    def send(self, request: dict[str, Any], tokens: int = 16) -> Any:
        """A request as `kvfoundry.integrations.vllm.client` makes them; what the openai client gives back."""
        return self.client.completions.create(**{"model": "model", "max_tokens": tokens, "temperature": 0, **request})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a counter of ours over its label values."""
        return self.counter(f"kvfoundry_{name}_total", **labels)

    def counter(self, name: str, **labels: str) -> float:
        """The sum of any number on vLLM's metrics page over its label values."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        found = 0.0
        for line in lines:
            held = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
            if held and all(f'{key}="{value}"' in held[1] for key, value in labels.items()):
                found += float(held[2])
        return found

    def lines(self) -> list[str]:
        """What the connector warned of in vLLM's log."""
        return [line for line in self.log.read_text().splitlines() if " WARNING " in line and "kvfoundry: " in line]

    def stop(self, how: int = signal.SIGTERM) -> None:
        """Gone, with its engine and workers; after a while by force. Nothing where it is gone."""
        if self._out.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self._out.close()


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Until something has happened; an AssertionError when it has not in so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def divergence(wanted: dict[str, float], found: dict[str, float]) -> float:
    """Kullback-Leibler divergence of the first token, over the likeliest tokens that both servers name."""
    both = wanted.keys() & found.keys()
    ours, theirs = (sum(math.exp(each[token]) for token in both) for each in (wanted, found))
    return sum(
        math.exp(wanted[token]) / ours * (wanted[token] - math.log(ours) - found[token] + math.log(theirs))
        for token in both
    )
