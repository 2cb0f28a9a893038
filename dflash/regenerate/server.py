"""The target served elsewhere, by anything that speaks OpenAI's /v1/chat/completions.

What passes by itself is asked again, with growing pauses: refused and broken connections, time-outs, overload (429,
408) and server errors (5xx), answers that make no sense. What will not pass is told at once: a wrong address, name or
key. A request that the server finds wrong (400, 413, 422: most often too long) leaves its conversation out; many of
them in a row end the run.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dflash.data.chat import BadRow, Conversation
from dflash.regenerate.turns import Answered, Messages, turns
from dflash.settings import SettingError

_PAUSE, _LONGEST_PAUSE = 0.25, 15.0  # seconds before a request is repeated: doubled each time, up to the second
_TIMEOUT = 900.0  # seconds without a byte; a long response of a busy server takes minutes
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_ROW_AT_FAULT = {400, 413, 422}
_REFUSED, _REFUSED_IN_A_ROW = "refused by the server", 16
_ENDS = {"stop": False, "eos": False, "eos_token": False, "stop_sequence": False, "length": True}  # reason -> cut


class _Refused(Exception):
    """The server will not answer this request, whatever the pause."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An API key must not follow a redirect to another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


@dataclass
class Server:
    """An address that answers; make one with `open`. Any number of threads may call it."""

    url: str  # up to and with /v1
    model: str
    patience: float = 120.0  # seconds that one request is repeated before the server counts as gone
    key: str = field(default="", repr=False)
    stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    @classmethod
    def open(
        cls, url: str, model: str | None = None, *, api_key_env: str | None = None, patience: float = 120.0
    ) -> Server:
        """A server that has been asked for its models and has `model` (None: its first). Raises SettingError."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError("--server", url, "must be an address such as http://localhost:8000")
        base = url.rstrip("/")
        server = cls(base if base.endswith("/v1") else base + "/v1", model or "", patience, _key(api_key_env))
        if model:
            return server
        try:
            listed = server.call("/models", None)
            server.model = str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError, _Refused):
            raise SettingError("--server-model", None, f"must be named: {url} does not list its models") from None
        return server

    def call(self, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON object that the server answers; repeats what may pass.

        Raises _Refused for a request at fault, SettingError when the server is gone, refuses or talks nonsense.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url + path, data, headers)
        opener = urllib.request.build_opener(_NoRedirect)
        deadline, pause = time.monotonic() + self.patience, _PAUSE
        while True:
            wait = pause
            try:
                with opener.open(request, timeout=_TIMEOUT) as response:
                    answer = json.loads(response.read())
                if isinstance(answer, dict) and (body is None or _choice(answer) is not None):
                    return answer
                why = f"its answer is not that of a chat server: {str(answer)[:200]}"
            except urllib.error.HTTPError as error:
                why = f"it answers {error.code}: {self._said(error)}"
                if error.code in _ROW_AT_FAULT:
                    raise _Refused(why) from None
                if error.code not in _PASSING:
                    raise SettingError("--server", self.url, why) from None
                wait = max(pause, _asked_to_wait(error))
            except ValueError:  # no JSON, no UTF-8
                why = "its answer is not JSON"
            except (OSError, http.client.HTTPException) as error:
                why = f"it cannot be reached ({getattr(error, 'reason', None) or error!r})"
            if time.monotonic() + wait > deadline:
                raise SettingError(
                    "server", self.url, f"{why}; asked again for {self.patience:g} s; what is written is kept"
                )
            if self.stopped.wait(wait):
                raise _Refused("stopped")
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _said(self, error: urllib.error.HTTPError) -> str:
        """The beginning of an error's text, on one line; some servers repeat the key in it."""
        try:
            text = error.read(4096).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            text = ""
        text = " ".join(text.split())[:200] or str(error.reason)
        return text.replace(self.key, "[key]") if self.key else text


def _key(name: str | None) -> str:
    """The API key in the environment variable `name`; never part of a message."""
    if name is None:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise SettingError("--api-key-env", name, "must be an environment variable that holds the API key")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise SettingError("--api-key-env", name, "its value must be printable ASCII without spaces")
    return key


def _choice(answer: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The message and the reason of its end; None where the answer has no such thing."""
    try:
        choice = answer["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason") or "stop"
        if isinstance(message, dict) and isinstance(message.get("content") or "", str):
            return message, str(reason)
    except (KeyError, IndexError, TypeError, AttributeError):
        pass
    return None


def _asked_to_wait(error: urllib.error.HTTPError) -> float:
    try:
        return min(_LONGEST_PAUSE, float(error.headers.get("Retry-After") or 0))
    except ValueError:  # a date
        return 0.0


class ServerEngine:
    """Answers `parallel` conversations at a time, a request in flight for each."""

    def __init__(
        self,
        server: Server,
        *,
        max_new: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        thinking: bool = True,
        parallel: int = 32,
    ) -> None:
        self.server, self.parallel, self.seed = server, parallel, seed
        self.options: dict[str, Any] = {"max_tokens": max_new, "temperature": temperature, "top_p": top_p}
        if not thinking:
            self.options["chat_template_kwargs"] = {"enable_thinking": False}

    def answer(self, conversations: Sequence[Conversation]) -> Iterator[Answered]:
        """The conversations with responses, in the order given; raises SettingError when the server gives up."""
        pool = ThreadPoolExecutor(self.parallel, thread_name_prefix="request")
        # Some conversations more than requests, so that a slow one at the head keeps nobody waiting.
        ahead: deque[Future[Answered]] = deque()
        refused = 0
        left = iter(conversations)
        try:
            while True:
                while len(ahead) < 8 * self.parallel and (conversation := next(left, None)) is not None:
                    ahead.append(pool.submit(self._conversation, conversation))
                if not ahead:
                    return
                answered = ahead.popleft().result()
                refused = refused + 1 if answered.left_out == _REFUSED else 0
                if refused == _REFUSED_IN_A_ROW:
                    raise SettingError("--server", self.server.url, f"{answered.detail} ({refused} times in a row)")
                yield answered
        finally:
            self.server.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _conversation(self, conversation: Conversation) -> Answered:
        one = Answered(conversation.line)
        try:
            for turn, said in enumerate(turns(conversation.messages)):
                one.messages += said
                one.messages.append(self._response(one, turn))
        except BadRow as bad:
            one.left_out = bad.reason
        except _Refused as refused:
            one.left_out, one.detail = _REFUSED, str(refused)
        return one

    def _response(self, one: Answered, turn: int) -> dict[str, Any]:
        # Servers may refuse keys of a message that they do not know.
        messages: Messages = [{"role": m["role"], "content": m["content"]} for m in one.messages]
        body = {"model": self.server.model, "messages": messages} | self.options
        if self.options["temperature"]:
            body["seed"] = (self.seed * 1_000_003 + one.line * 101 + turn) % (1 << 31)
        answer = self.server.call("/chat/completions", body)
        choice = _choice(answer)
        assert choice is not None  # `call` saw to that
        message, reason = choice
        if reason not in _ENDS:
            raise BadRow(f"its response ended with {reason}")
        usage = answer.get("usage")
        one.tokens += int(usage.get("completion_tokens") or 0) if isinstance(usage, dict) else 0
        response = {"role": "assistant", "content": message.get("content") or ""}
        thoughts = message.get("reasoning_content") or message.get("reasoning")  # vLLM renamed it
        if isinstance(thoughts, str):
            response["reasoning_content"] = thoughts
        return response | ({"cut": True} if _ENDS[reason] else {})
