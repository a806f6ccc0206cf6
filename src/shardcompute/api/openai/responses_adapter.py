"""Reply adapter of OpenAI's Responses API: a chat as output items, or as a stream of numbered, named events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from shardcompute.api.body import ReplyBody
from shardcompute.api.generation.chat import ChatPlan
from shardcompute.api.generation.conversation import ChatAdapter
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.replies import ChatChoice, ChatChunkChoice, ChosenToken
from shardcompute.api.openai.envelope import usage_of
from shardcompute.api.openai.responses_schemas import (
    IncompleteDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningPart,
    ResponseEvent,
    ResponseReply,
    ResponsesRequest,
    ResponsesUsage,
)

Status = Literal["in_progress", "completed", "incomplete"]


class ResponsesAdapter(ChatAdapter):
    """Words a chat as an item of thinking, if there is any, one message item, then one item for each tool call."""

    def __init__(
        self,
        chat: ChatPlan,
        body: ResponsesRequest,
        *,
        request_id: str,
        created_s: int,
        keep: Callable[[ResponseReply], bool],
    ) -> None:
        """`keep` takes the finished reply and says whether it was kept."""
        super().__init__(chat)
        self._keep = keep
        self._body = body
        self._request_id = request_id
        self._created_s = created_s
        self._sequence = 0
        self._done: list[OutputItem] = []
        self._text: str | None = None
        """Of the message under way."""
        self._thought: str | None = None
        """Of the thinking under way."""
        self._logprobs: list[ChosenToken] = []
        self._call: OutputCall | None = None

    def opening(self) -> Iterable[ReplyBody]:
        reply = self._reply("in_progress", [], None)
        yield self._event("response.created", response=reply)
        yield self._event("response.in_progress", response=reply)

    def translate(self, choice: ChatChunkChoice, outcome: Outcome) -> Iterator[ReplyBody]:
        logprobs = choice.logprobs.content if choice.logprobs is not None else []
        if choice.delta.reasoning_content:
            yield from self._think(choice.delta.reasoning_content)
        elif choice.delta.content or (logprobs and self._thought is None):
            yield from self._say(choice.delta.content or "", logprobs)
        for call in choice.delta.tool_calls or ():
            function = call.function
            if call.id is not None:
                yield from self._end_item("completed")
                name = function.name if function is not None else None
                yield from self._begin_call(call.id, name or "")
            if function is not None and function.arguments and self._call is not None:
                arguments = self._call.arguments + function.arguments
                self._call = self._call.model_copy(update={"arguments": arguments})
                yield self._event(
                    "response.function_call_arguments.delta",
                    item_id=self._call.id,
                    output_index=len(self._done),
                    delta=function.arguments,
                )
        if choice.finish_reason is not None:
            if not self._done and self._text is None and self._thought is None and self._call is None:
                yield from self._say("", [])
            status: Status = "incomplete" if choice.finish_reason == "length" else "completed"
            yield from self._end_item(status)
            yield self._event(f"response.{status}", response=self._finished(status, self._done, outcome))

    def translate_whole(self, choice: ChatChoice, outcome: Outcome) -> ReplyBody:
        status: Status = "incomplete" if choice.finish_reason == "length" else "completed"
        calls = choice.message.tool_calls or ()
        output: list[OutputItem] = []
        thought = choice.message.reasoning_content
        if thought:
            is_last = not (choice.message.content or calls)
            output.append(self._reasoning(0, status if is_last else "completed", thought))
        if choice.message.content or not (calls or thought):
            logprobs = choice.logprobs.content if choice.logprobs is not None else []
            text = _part(choice.message.content or "", logprobs)
            output.append(self._message(len(output), "completed" if calls else status, [text]))
        for index, call in enumerate(calls, start=1):
            function = call.function
            item = self._new_call(len(output), call.id, function.name)
            own: Status = status if index == len(calls) else "completed"
            output.append(item.model_copy(update={"arguments": function.arguments, "status": own}))
        return self._finished(status, output, outcome)

    def _think(self, text: str) -> Iterator[ReplyBody]:
        if self._thought is None:
            yield from self._end_item("completed")
            self._thought = ""
            index = len(self._done)
            item = self._reasoning(index, "in_progress", None)
            yield self._event("response.output_item.added", output_index=index, item=item)
            part = ReasoningPart(type="reasoning_text", text="")
            yield self._event("response.content_part.added", **self._place("rs"), part=part)
        self._thought += text
        yield self._event("response.reasoning_text.delta", **self._place("rs"), delta=text)

    def _say(self, text: str, logprobs: list[ChosenToken]) -> Iterator[ReplyBody]:
        if self._text is None:
            yield from self._end_item("completed")
        index = len(self._done)
        if self._text is None:
            self._text, self._logprobs = "", []
            item = self._message(index, "in_progress", [])
            yield self._event("response.output_item.added", output_index=index, item=item)
            yield self._event(
                "response.content_part.added",
                item_id=item.id,
                output_index=index,
                content_index=0,
                part=_part("", []),
            )
        self._text += text
        self._logprobs += logprobs
        yield self._event(
            "response.output_text.delta",
            item_id=self._item_id("msg", index),
            output_index=index,
            content_index=0,
            delta=text,
            logprobs=logprobs,
        )

    def _begin_call(self, call_id: str, name: str) -> Iterator[ReplyBody]:
        self._call = self._new_call(len(self._done), call_id, name)
        yield self._event("response.output_item.added", output_index=len(self._done), item=self._call)

    def _end_item(self, status: Status) -> Iterator[ReplyBody]:
        """The item under way, if there is one, is over."""
        index = len(self._done)
        item: OutputItem
        if self._thought is not None:
            place = self._place("rs")
            item = self._reasoning(index, status, self._thought)
            yield self._event("response.reasoning_text.done", **place, text=self._thought)
            yield self._event("response.content_part.done", **place, part=item.content[0])
        elif self._text is not None:
            place = self._place("msg")
            part = _part(self._text, self._logprobs)
            yield self._event("response.output_text.done", **place, text=self._text, logprobs=self._logprobs)
            yield self._event("response.content_part.done", **place, part=part)
            item = self._message(index, status, [part])
        elif self._call is not None:
            item = self._call.model_copy(update={"status": status})
            if status == "completed":  # arguments that were cut short are not done
                yield self._event(
                    "response.function_call_arguments.done",
                    item_id=item.id,
                    output_index=index,
                    name=item.name,
                    arguments=item.arguments,
                )
        else:
            return
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._done.append(item)
        self._text = self._thought = self._call = None

    def _place(self, kind: str) -> dict[str, Any]:
        """Of the only part of the item under way."""
        index = len(self._done)
        return {"item_id": self._item_id(kind, index), "output_index": index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._sequence, **fields)
        self._sequence += 1
        return event

    def _message(self, index: int, status: Status, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(
            type="message",
            id=self._item_id("msg", index),
            status=status,
            role="assistant",
            content=content,
        )

    def _reasoning(self, index: int, status: Status, thought: str | None) -> OutputReasoning:
        parts = [] if thought is None else [ReasoningPart(type="reasoning_text", text=thought)]
        return OutputReasoning(
            type="reasoning", id=self._item_id("rs", index), status=status, summary=[], content=parts
        )

    def _new_call(self, index: int, call_id: str, name: str) -> OutputCall:
        return OutputCall(
            type="function_call",
            id=self._item_id("fc", index),
            call_id=call_id,
            name=name,
            arguments="",
            status="in_progress",
        )

    def _item_id(self, kind: str, index: int) -> str:
        return f"{kind}_{self._request_id}_{index}"

    def _finished(self, status: Status, output: list[OutputItem], outcome: Outcome) -> ResponseReply:
        reply = self._reply(status, output, outcome)
        return reply if self._keep(reply) else reply.model_copy(update={"store": False})

    def _reply(self, status: Status, output: list[OutputItem], outcome: Outcome | None) -> ResponseReply:
        body, given = self._body, self._body.model_dump(exclude_none=True, by_alias=True)
        return ResponseReply(
            id=f"resp_{self._request_id}",
            object="response",
            created_at=self._created_s,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens")
            if status == "incomplete"
            else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.plan.model.name,
            output=list(output),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=given.get("text", {"format": {"type": "text"}}),
            tool_choice=given.get("tool_choice", "auto"),
            tools=given.get("tools", []),
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="disabled",
            usage=None if outcome is None else self._usage(outcome),
            metadata=body.metadata or {},
        )

    def _usage(self, outcome: Outcome) -> ResponsesUsage:
        thought = self.chat.choices.reasoning_tokens([outcome])
        usage = usage_of(self.plan, [outcome], thought)
        details = usage.prompt_tokens_details
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details={"cached_tokens": 0 if details is None else details.cached_tokens},
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": thought},
            total_tokens=usage.total_tokens,
        )


def _part(text: str, logprobs: list[ChosenToken]) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=list(logprobs))
