"""Chat choices: each generation's text as an assistant's message with tool calls, in deltas or whole.

Every protocol's adapter translates these choices; their shapes are those of OpenAI's chat completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.logprobs import chat_logprobs
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.generation.replies import (
    AssistantMessage,
    CalledFunction,
    CalledFunctionDelta,
    CalledTool,
    CalledToolDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
)
from shardcompute.api.reasoning import ChannelPlan, ThinkingPlan
from shardcompute.api.tools import (
    AnswerText,
    CallArguments,
    CallReader,
    CallStarted,
    Event,
    ReasoningText,
    ToolPlan,
)
from shardcompute.core.generation import Delta
from shardcompute.node.service import TextCodec


class ChatChoices:
    """The choices of one chat, in the order of the plan's requests."""

    def __init__(
        self,
        plan: Plan,
        tools: ToolPlan | None,
        thinking: ThinkingPlan | ChannelPlan | None = None,
        *,
        has_logprobs: bool,
    ) -> None:
        self._codec = plan.codec
        self._builders = [MessageBuilder(tools, thinking) for _ in plan.requests]
        self._has_logprobs = has_logprobs

    def chunks(self, index: int, delta: Delta, outcome: Outcome) -> Iterator[ChatChunkChoice]:
        """What one delta adds to choice `index`; the last has a reason to finish and nothing else."""
        builder, is_over = self._builders[index], outcome.finish is not None
        logprobs = chat_logprobs(self._codec, delta.tokens) if self._has_logprobs and delta.tokens else None
        deltas = builder.push(delta.text, finish=outcome.finish, must_speak=logprobs is not None)
        for left, each in zip(range(len(deltas) - 1, -1, -1), deltas, strict=True):
            yield ChatChunkChoice(
                index=index, delta=each, logprobs=None if left else logprobs, finish_reason=None
            )
        if is_over:
            reason = _reason(builder, outcome)
            yield ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=None, finish_reason=reason)

    def add_text(self, index: int, delta: Delta) -> bool:
        """Whether a delta adds its text to choice `index` and nothing else, as `text_choice` words it; it is added
        then. False: `chunks` has to tell."""
        if self._has_logprobs or delta.finish is not None or not delta.text:
            return False
        return self._builders[index].add_text(delta.text)

    def reasoning_tokens(self, outcomes: Iterable[Outcome]) -> int:
        """How many tokens of these answers were thinking, as far as they were read."""
        answered = zip(self._builders, outcomes, strict=True)
        return sum(_tokens_of(self._codec, outcome, builder.thought_chars) for builder, outcome in answered)

    def whole(self, outcomes: Iterable[Outcome]) -> list[ChatChoice]:
        return [self._choice(index, outcome) for index, outcome in enumerate(outcomes)]

    def _choice(self, index: int, outcome: Outcome) -> ChatChoice:
        builder = self._builders[index]
        builder.push(outcome.text, finish=outcome.finish)
        return ChatChoice(
            index=index,
            message=builder.message(),
            logprobs=chat_logprobs(self._codec, outcome.tokens) if self._has_logprobs else None,
            finish_reason=_reason(builder, outcome),
        )


def text_choice(index: int, text: str) -> ChatChunkChoice:
    """A chunk's choice that has text and nothing else."""
    return ChatChunkChoice(index=index, delta=ChatDelta(content=text), logprobs=None, finish_reason=None)


def _reason(builder: MessageBuilder, outcome: Outcome) -> Literal["stop", "length", "tool_calls"]:
    assert outcome.finish is not None
    return "tool_calls" if outcome.finish == "stop" and builder.has_whole_calls else outcome.finish


def _tokens_of(codec: TextCodec, outcome: Outcome, characters: int) -> int:
    """How many tokens the first so many characters of an answer took."""
    if characters == 0:
        return 0
    left = len(outcome.text[:characters].encode(errors="replace"))
    for count, choice in enumerate(outcome.tokens):
        if left <= 0:
            return count
        left -= len(codec.token_bytes(choice.id))
    return len(outcome.tokens)


class MessageBuilder:
    """The assistant's message, built from an answer's text as it comes: what was said and called so far."""

    def __init__(self, tools: ToolPlan | None, thinking: ThinkingPlan | ChannelPlan | None = None) -> None:
        self._tools = tools
        self._reader: CallReader | None = None
        if thinking is not None:
            self._reader = thinking.reader(tools)
        elif tools is not None:
            self._reader = tools.reader()
        self._thoughts: list[str] = []
        self._ids: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []
        self._texts: list[str] = []
        self._is_muted = False
        self._is_open = False

    @property
    def thought_chars(self) -> int:
        return 0 if self._reader is None else self._reader.thought_chars

    @property
    def has_calls(self) -> bool:
        return bool(self._ids)

    @property
    def has_whole_calls(self) -> bool:
        """Whether it calls something, and the last call has all of its arguments."""
        return self.has_calls and self._reader is not None and not self._reader.is_mid_call

    def push(
        self, text: str, *, finish: Literal["stop", "length"] | None = None, must_speak: bool = False
    ) -> list[ChatDelta]:
        """The deltas that this adds: the role, text, each call's id and name, then pieces of its arguments. The last
        text comes with what ended the answer.

        With `must_speak` there is a delta of text or a call even where nothing is certain yet.
        """
        if self._reader is None:
            events: list[Event] = [AnswerText(text)] if text else []
        else:
            events = self._reader.push(text)
            events += self._reader.finish(is_cut=finish == "length") if finish is not None else []
        deltas = list(self._deltas_of(events))
        if must_speak and not deltas:
            deltas = [ChatDelta(content="")]
        if not self._is_open and (deltas or finish is not None or self._reader is None):
            self._is_open = True
            deltas = _opened(deltas)
        return deltas

    def add_text(self, text: str) -> bool:
        """Go on with the text; False where that may open the message, or be a call or a thought."""
        if (self._reader is not None and not self._reader.is_plain) or not self._is_open:
            return False
        self._texts.append(text)
        return True

    def message(self) -> AssistantMessage:
        """All of it."""
        text = "".join(self._texts)
        thought = "".join(self._thoughts)
        thinking: dict[str, Any] = {"reasoning_content": thought, "reasoning": thought} if thought else {}
        if not self.has_calls:
            content = text or (None if thought else "")
            return AssistantMessage(role="assistant", content=content, refusal=None, **thinking)
        called = zip(self._ids, self._names, self._arguments, strict=True)
        calls = [
            CalledTool(
                id=call_id,
                type="function",
                function=CalledFunction(name=name, arguments="".join(arguments)),
            )
            for call_id, name, arguments in called
        ]
        return AssistantMessage(
            role="assistant", content=text or None, refusal=None, tool_calls=calls, **thinking
        )

    def _deltas_of(self, events: Iterable[Event]) -> Iterable[ChatDelta]:
        for event in events:
            if isinstance(event, AnswerText):
                self._texts.append(event.text)
                yield ChatDelta(content=event.text)
            elif isinstance(event, ReasoningText):
                self._thoughts.append(event.text)
                yield ChatDelta(reasoning_content=event.text, reasoning=event.text)
            elif isinstance(event, CallStarted):
                assert self._tools is not None
                self._is_muted = self.has_calls and not self._tools.is_parallel
                if not self._is_muted:
                    yield self._started(event.name, self._tools.format.new_id())
            elif not self._is_muted:
                yield self._argued(event)

    def _started(self, name: str, call_id: str) -> ChatDelta:
        self._ids.append(call_id)
        self._names.append(name)
        self._arguments.append([])
        function = CalledFunctionDelta(name=name, arguments="")
        call = CalledToolDelta(index=len(self._ids) - 1, id=call_id, type="function", function=function)
        return ChatDelta(tool_calls=[call])

    def _argued(self, event: CallArguments) -> ChatDelta:
        self._arguments[-1].append(event.text)
        function = CalledFunctionDelta(arguments=event.text)
        return ChatDelta(tool_calls=[CalledToolDelta(index=len(self._ids) - 1, function=function)])


def _opened(deltas: list[ChatDelta]) -> list[ChatDelta]:
    """With the role in front, which shares a delta with a call but not with text."""
    if deltas and deltas[0].tool_calls:
        return [ChatDelta(role="assistant", content=None, tool_calls=deltas[0].tool_calls), *deltas[1:]]
    return [ChatDelta(role="assistant", content=""), *deltas]
