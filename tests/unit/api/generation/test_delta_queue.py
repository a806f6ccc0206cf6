"""The queue between generations and their response: bounded, in order, and it says when nothing comes."""

from __future__ import annotations

import asyncio
import json

from shardcompute.api.body import TextTemplate
from shardcompute.api.generation.chat_choices import text_choice
from shardcompute.api.generation.generations import DeltaQueue
from shardcompute.api.openai.replies import ChatChunk
from shardcompute.core.generation import Delta

SILENCE_S = 0.02


def test_silence_is_told_and_what_comes_later_is_not_lost() -> None:
    async def run() -> list[object]:
        queue = DeltaQueue(2)
        heard: list[object] = [await queue.get(SILENCE_S), await queue.get(SILENCE_S)]
        waiting = asyncio.ensure_future(queue.get(50 * SILENCE_S))
        await asyncio.sleep(0)
        await queue.put(0, Delta("a"))
        heard.append(await waiting)
        await queue.put(1, Delta("b"))
        heard += [await queue.get(SILENCE_S), await queue.get(SILENCE_S)]
        queue.close()
        return heard

    assert asyncio.run(run()) == [None, None, (0, Delta("a")), (1, Delta("b")), None]


def test_who_puts_waits_for_room() -> None:
    async def run() -> list[int]:
        queue = DeltaQueue(2)
        putting = [asyncio.ensure_future(queue.put(number, Delta())) for number in range(6)]
        await asyncio.sleep(0)
        assert sum(each.done() for each in putting) == 2
        heard = []
        for _ in range(6):
            item = await queue.get(60)
            assert item is not None
            heard.append(item[0])
            await asyncio.sleep(0)
        await asyncio.gather(*putting)
        queue.close()
        return heard

    assert asyncio.run(run()) == list(range(6))


def test_a_filled_template_is_what_would_have_been_written() -> None:
    def chunk(text: str) -> ChatChunk:
        return ChatChunk(
            id="chatcmpl-1",
            object="chat.completion.chunk",
            created=1,
            model='a "model"',
            system_fingerprint="x",
            choices=[text_choice(0, text)],
        )

    template = TextTemplate(chunk)
    for text in ("", "plain", 'quotes " and \\ and \n', "ünïcödé \u2028 \x00\x1f \U0001f600", "</script>"):
        assert json.loads(template.fill(text).to_json()) == json.loads(chunk(text).to_json())
