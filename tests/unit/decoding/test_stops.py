from __future__ import annotations

import weakref

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.decoding import StopMatcher, StopResult


def test_without_stop_strings_all_text_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == StopResult("anything")
    assert matcher.finish() == ""


def test_text_is_held_only_while_it_could_become_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == StopResult("the ")
    assert matcher.push("N") == StopResult("")
    assert matcher.push("EN") == StopResult("EN")
    assert matcher.push("D and more") == StopResult("", "END")
    assert matcher.matched == "END"


def test_a_stop_string_is_cut_or_kept_and_later_text_dropped() -> None:
    for include, shown in ((False, "one"), (True, "one\n\n")):
        matcher = StopMatcher(["\n\n"], include_stop=include)
        assert matcher.push("one\n").text + matcher.push("\ntwo").text == shown
        assert matcher.push("three") == StopResult("", "\n\n")
        assert matcher.finish() == ""


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert StopMatcher(["abcd", "bc"]).push("abcd") == StopResult("a", "bc")


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert StopMatcher(["c", "abc", "bc"]).push("xabc") == StopResult("x", "abc")


def test_finish_gives_back_held_text() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("x</") == StopResult("x")
    assert matcher.finish() == "</"
    assert matcher.finish() == ""


def test_fallback_finds_a_match_inside_a_failed_one() -> None:
    assert StopMatcher(["aab"]).push("aaab") == StopResult("a", "aab")


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(UsageError, match="'stop'"):
        StopMatcher(["a", ""])


def test_answers_that_watch_for_the_same_strings_share_an_automaton() -> None:
    first, second, other = StopMatcher(["ab", "c"]), StopMatcher(["ab", "c"], True), StopMatcher(["ab"])
    assert first._stops is second._stops
    assert first._stops is not other._stops
    assert first.push("xa") == StopResult("x")
    assert second.push("xab") == StopResult("xab", "ab")
    assert first.push("-") == StopResult("a-")


def test_an_automaton_is_built_when_text_comes_and_goes_with_the_last_answer() -> None:
    matcher = StopMatcher(["never seen before"])
    assert "automaton" not in vars(matcher._stops)
    matcher.push("n")
    assert "automaton" in vars(matcher._stops)
    gone = weakref.ref(matcher._stops)
    del matcher
    assert gone() is None
