"""One choice of a chat, worded as it comes: text, and calls of tools where there are tools to call."""

from __future__ import annotations

from collections.abc import Iterable

from shardcompute.api.generation.replies import (
    AssistantMessage,
    CalledFunction,
    CalledFunctionDelta,
    CalledTool,
    CalledToolDelta,
    ChatDelta,
)
from shardcompute.api.tools import CallArguments, CallStarted, Event, SpokenText, ToolPlan


class ChatWords:
    """What the assistant has said and called so far."""

    def __init__(self, tools: ToolPlan | None) -> None:
        self._tools = tools
        self._reader = None if tools is None else tools.reader()
        self._ids: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []
        self._texts: list[str] = []
        self._is_muted = False
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return bool(self._ids)

    def push(self, text: str, *, is_over: bool = False, must_speak: bool = False) -> list[ChatDelta]:
        """What OpenAI's chunks would say: the role, text, each call's id and name, then pieces of its arguments.

        With `must_speak` there is a chunk of text or a call even where nothing is certain yet.
        """
        if self._reader is None:
            events: list[Event] = [SpokenText(text)] if text else []
        else:
            events = self._reader.push(text) + (self._reader.finish() if is_over else [])
        worded = list(self._worded(events))
        if must_speak and not worded:
            worded = [ChatDelta(content="")]
        if not self._is_open and (worded or is_over or self._reader is None):
            self._is_open = True
            worded = _opened(worded)
        return worded

    def message(self) -> AssistantMessage:
        """All of it."""
        text = "".join(self._texts)
        if not self.has_calls:
            return AssistantMessage(role="assistant", content=text, refusal=None)
        called = zip(self._ids, self._names, self._arguments, strict=True)
        calls = [
            CalledTool(
                id=call_id,
                type="function",
                function=CalledFunction(name=name, arguments="".join(arguments)),
            )
            for call_id, name, arguments in called
        ]
        return AssistantMessage(role="assistant", content=text or None, refusal=None, tool_calls=calls)

    def _worded(self, events: Iterable[Event]) -> Iterable[ChatDelta]:
        for event in events:
            if isinstance(event, SpokenText):
                self._texts.append(event.text)
                yield ChatDelta(content=event.text)
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


def _opened(worded: list[ChatDelta]) -> list[ChatDelta]:
    """With the role in front, which shares a chunk with a call but not with text."""
    if worded and worded[0].tool_calls:
        return [ChatDelta(role="assistant", content=None, tool_calls=worded[0].tool_calls), *worded[1:]]
    return [ChatDelta(role="assistant", content=""), *worded]
