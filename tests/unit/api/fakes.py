"""A service that plays a script, a codec of one token per byte, and a bare ASGI client."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardcompute.core.errors import CapacityError, UnknownModelError, UsageError
from shardcompute.core.generation import Delta, GenerationRequest, Timings, TokenChoice
from shardcompute.models.vocabulary import Vocabulary
from shardcompute.node.service import ServedModel, ServiceLoad

EOS, BOS, PADDING = 256, 257, 258
SPECIAL = {EOS: b"<eos>", BOS: b"<bos>"}
VOCABULARY = Vocabulary(
    (*(bytes([value]) for value in range(256)), *SPECIAL.values(), b""), frozenset(SPECIAL), frozenset({EOS})
)


def served(name: str, context_length: int = 64, created_s: int = 1_700_000_000) -> ServedModel:
    return ServedModel(name, context_length, created_s, digest="ab" * 32, size_bytes=12_345)


MODEL = served("org/tiny")
TIMINGS = Timings(queue_s=0.5, prefill_s=2.0, decode_s=1.0, prompt_tokens=4, generated_tokens=3)


@dataclass
class ByteCodec:
    template: str = "{{ tools }} {{ messages }} <tool_call>"
    opening: str = "a:"
    """What stands before an answer."""
    tokens: Vocabulary = VOCABULARY
    eos_ids = frozenset({EOS})

    def encode(self, text: str, *, add_special: bool = True, context_length: int | None = None) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        kept = [i for i in ids if not (skip_special and i in SPECIAL)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == PADDING:
            return b""
        if token_id not in range(258):
            raise IndexError(token_id)
        return SPECIAL.get(token_id) or bytes([token_id])

    def vocabulary(self) -> Vocabulary:
        return self.tokens

    def chat_template_source(self, *, has_tools: bool = False) -> str | None:
        return self.template

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if messages[0]["role"] == "tool":
            raise UsageError("the template refuses a tool message first", hint="start with a user message")
        names = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        return (
            names
            + "".join(f"{name}={value};" for name, value in sorted((variables or {}).items()))
            + "".join(f"{m['role'][0]}:{self.thought_of(m)}{m['content']};" for m in messages)
            + self.opening * add_generation_prompt
        )

    def thought_of(self, message: Mapping[str, Any]) -> str:
        thought = message.get("reasoning_content")
        return f"({thought})" if thought else ""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, context_length: int | None = None, **options: Any
    ) -> list[int]:
        return self.encode(self.render_chat(messages, **options), add_special=False)


Step = Delta | Exception | asyncio.Event


def choice(token_id: int, logprob: float = -0.5) -> TokenChoice:
    return TokenChoice(token_id, logprob, ((token_id, logprob), (ord("z"), float("-inf"))))


def say(*pieces: str, finish: str = "stop") -> list[Step]:
    """One delta for each piece, its bytes as tokens, then the end."""
    deltas: list[Step] = [Delta(text=p, tokens=tuple(choice(b) for b in p.encode())) for p in pieces]
    return [*deltas, Delta(finish=finish, timings=TIMINGS)]  # type: ignore[arg-type]


@dataclass
class FakeService:
    script: Iterable[Step] = field(default_factory=lambda: say("Hel", "lo"))
    scripts: Mapping[int, Iterable[Step]] = field(default_factory=dict)
    """By order of the generation, where it differs from `script`."""
    ready: bool = True
    served: tuple[ServedModel, ...] = (MODEL,)
    hidden: bytes = struct.pack("<2f", 3.0, 4.0)
    requests: list[GenerationRequest] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    when_closed: Callable[[], None] = lambda: None
    closing_turns: int = 0
    """Turns of the event loop that closing a generation takes."""
    text_codec: ByteCodec = field(default_factory=ByteCodec)

    def models(self) -> Sequence[ServedModel]:
        return self.served

    def codec(self, model: str) -> ByteCodec:
        if model not in {served.name for served in self.served}:
            raise UnknownModelError(model)
        return self.text_codec

    def is_ready(self) -> bool:
        return self.ready

    def obstacle(self) -> CapacityError | None:
        return None if self.ready else CapacityError("tiny is still being loaded", hint="try again")

    def load(self) -> ServiceLoad:
        return ServiceLoad(running=2, waiting=3, kv_used_fraction=0.25)

    async def generate(self, model: str, request: GenerationRequest) -> AsyncIterator[Delta]:
        steps = self.scripts.get(self.opened, self.script)
        self.opened += 1
        self.requests.append(request)
        try:
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                is_first = step.text != "" and request.prompt_logprobs is not None
                prompt = _scored(request.prompt) if is_first else ()
                request_wants = request.sampling.logprobs is not None
                tokens = step.tokens if request_wants else tuple(TokenChoice(t.id) for t in step.tokens)
                if request.sampling.wants_hidden:
                    tokens = tuple(replace(t, hidden=self.hidden) for t in tokens)
                yield Delta(step.text, tokens, prompt, step.finish, step.timings, step.interruption)
        finally:
            for _ in range(self.closing_turns):
                await asyncio.sleep(0)
            self.closed += 1
            self.when_closed()


def _scored(prompt: Sequence[int]) -> tuple[TokenChoice, ...]:
    first, *others = prompt
    return (TokenChoice(first), *(choice(token, -0.25) for token in others))


@dataclass
class AsgiCall:
    """One request to an ASGI application, watched message by message; `leave` is the client hanging up."""

    app: Any
    path: str
    body: Mapping[str, Any]
    on_body: Callable[[bytes, AsgiCall], None] = lambda body, call: None
    messages: list[Any] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    _sent: bool = False

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self.app(scope, self._receive, self._send)

    @property
    def text(self) -> str:
        return b"".join(m["body"] for m in self.messages if m["type"] == "http.response.body").decode()

    async def _receive(self) -> Mapping[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        if message["type"] == "http.response.body":
            self.on_body(message["body"], self)


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def say_call(city: str = "Rome") -> list[Step]:
    """Some words, then a call of the tool `weather`, as a model writes it that was told how to."""
    called = json.dumps({"name": "weather", "arguments": {"city": city}})
    return say("Let me see. ", f"<tool_call>\n{called[:20]}", f"{called[20:]}\n</tool_call>")


def named_events(text: str) -> list[tuple[str, Any]]:
    """Name and data of each event of a stream whose events have names."""
    found = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def events(text: str) -> list[Any]:
    """The data of each event; `[DONE]` stays a string, comments are left out."""
    blocks = [block for block in text.split("\n\n") if block]
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
