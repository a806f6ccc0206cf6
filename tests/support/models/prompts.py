"""Prompts for conformance: short and long, prose, code, lists, numbers, other scripts, text that repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue or, where `is_chat`, a question to answer."""

    name: str
    text: str
    is_chat: bool = False

    def encode(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        if self.is_chat:
            return tuple(tokenizer.encode_chat([{"role": "user", "content": self.text}]))
        return tuple(tokenizer.encode(self.text))


_LIGHTHOUSE = (
    "The lighthouse keeper wrote in his diary every evening, though there was seldom much to report. On Monday "
    "the wind turned to the north and brought rain. On Tuesday a fishing boat passed close to the rocks, and its "
    "crew waved. On Wednesday the lamp had to be cleaned twice, because the salt clung to the glass like frost. "
    "On Thursday nothing happened at all, which he recorded faithfully, with the hour and the height of the tide. "
    "On Friday the supply boat was late; it carried flour, oil, a bundle of newspapers that were three weeks old, "
    "and a letter from his sister, who asked once more when he would come home. He read the letter four times "
    "before he lit the lamp. On Saturday he began an answer, tore it up, and began again. He told her about the "
    "seals on the far beach, about the garden he had dug behind the wall, and about the strange green light that "
    "he had seen on the horizon just before dawn, three mornings in a row. On Sunday, when the sea was calm"
)

_LEDGER = (
    "item, count, price\napples, 12, 0.50\npears, 7, 0.65\nplums, 30, 0.20\nquinces, 4, 1.10\ncherries, 150, 0.05\n"
    "peaches, 9, 0.80\napricots, 16, 0.45\nfigs, 22, 0.35\ngrapes, 3, 2.75\nmelons, 2, 3.40\noranges, 18, 0.55\n"
    "lemons, 25, 0.30\nlimes, 14, 0.40\nmangoes, 6, 1.25\nkiwis, 20, 0.33\npapayas, 5,"
)

PROMPTS: Sequence[Prompt] = (
    Prompt("capital", "What is the capital of France, and what is it known for?", is_chat=True),
    Prompt("bread", "How do I bake a simple loaf of bread at home?", is_chat=True),
    Prompt("poem", "Write a short poem about the first snow of winter.", is_chat=True),
    Prompt("explain", "Explain to a child why the sky is blue.", is_chat=True),
    Prompt("advice", "My neighbour plays the drums at night. What should I say to him?", is_chat=True),
    Prompt("primes", "List the first ten prime numbers and say why 1 is not among them.", is_chat=True),
    Prompt("translate", "Translate into German: The train leaves at seven in the morning.", is_chat=True),
    Prompt("python", "def fibonacci(n: int) -> int:\n    "),
    Prompt(
        "javascript", "function debounce(callback, delayMs) {\n  let timer = null;\n  return (...args) => {\n"
    ),
    Prompt("sql", "SELECT customer.name, SUM(orders.total)\nFROM customer\nJOIN orders ON"),
    Prompt("json", '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",'),
    Prompt("shopping", "Shopping list:\n1. Milk\n2. Eggs\n3. Bread\n4."),
    Prompt("steps", "To change a bicycle tyre:\n- Turn the bicycle upside down.\n- Open the brake.\n- "),
    Prompt("french", "Il était une fois, dans un petit village au bord de la mer, une vieille dame qui"),
    Prompt("spanish", "La historia de la ciudad comienza en el siglo"),
    Prompt("japanese", "日本で一番高い山は"),
    Prompt("emoji", "The weather this week: ☀️ Monday, 🌧️ Tuesday, ⛈️"),
    Prompt("counting", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"),
    Prompt("sum", "17 + 25 = 42\n31 + 18 = 49\n26 + 57 ="),
    Prompt("refrain", "row, row, row your boat, row, row, row your boat, row, row, row your"),
    Prompt("one-word", "Once"),
    Prompt("one-letter", "A"),
    Prompt("lighthouse", _LIGHTHOUSE),
    Prompt("ledger", _LEDGER),
)
