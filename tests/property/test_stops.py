"""Stop matching over any chunking equals a naive scan of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.decoding import StopMatcher

# Few letters, so that overlaps and near misses are common.
texts = st.text(alphabet="ab\nß", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab\nß", min_size=1, max_size=5), max_size=4)


def scan(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@settings(max_examples=300)
@given(texts, stop_lists, st.booleans(), st.data())
def test_result_is_that_of_a_naive_scan_whatever_the_pieces(
    text: str, stops: list[str], include_stop: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    matcher = StopMatcher(stops, include_stop)
    shown = ""
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += matcher.push(text[start:stop]).text
    assert (shown + matcher.finish(), matcher.matched) == scan(text, stops, include_stop)


@settings(max_examples=200)
@given(texts, stop_lists)
def test_held_text_is_the_longest_possible_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        result = matcher.push(character)
        shown += result.text
        if result.matched is not None:
            return
        beginnings = [
            size for size in range(end + 1) if any(s.startswith(text[end - size : end]) for s in stops)
        ]
        assert shown == text[: end - max(beginnings, default=0)]
