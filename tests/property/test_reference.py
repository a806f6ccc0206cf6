"""Whatever is parsed can be written and parsed again; whatever is not is refused as a usage error."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import UsageError
from shardcompute.weights.sources.cache import _key_of, _reference_of
from shardcompute.weights.sources.reference import HubReference, parse_hub_reference, parse_reference

_WORDS = st.text("abZ09_.-/@:+~= \\\x00\n", max_size=24)
_NAMES = st.from_regex(r"[a-zA-Z0-9_]{1,8}([.-][a-zA-Z0-9_]{1,8})?", fullmatch=True)
_REVISIONS = st.one_of(
    st.just("main"), st.from_regex(r"[a-z0-9]{1,8}([./+-][a-z0-9A-Z]{1,8}){0,3}", fullmatch=True)
)
_QUANTS = st.one_of(st.none(), st.sampled_from(["Q4_K_M", "Q8_0", "UD-Q4_K_XL", "BF16", "B"]))
_HUB = st.builds(
    lambda org, repo, revision, quant: HubReference(f"{org}/{repo}", revision, quant),
    _NAMES,
    _NAMES,
    _REVISIONS,
    _QUANTS,
)


@settings(max_examples=300, deadline=None)
@given(_WORDS)
def test_any_text_parses_to_a_fixed_point_or_is_refused(text: str) -> None:
    try:
        reference = parse_reference(text)
    except UsageError:
        return
    assert parse_reference(str(reference)) == reference


@settings(max_examples=200, deadline=None)
@given(_HUB)
def test_hub_references_round_trip(reference: HubReference) -> None:
    assert parse_hub_reference(str(reference)) == reference


@settings(max_examples=200, deadline=None)
@given(_HUB, _HUB)
def test_cache_folders_are_one_safe_name_and_tell_references_apart(
    one: HubReference, other: HubReference
) -> None:
    key = _key_of(one)
    assert Path(key).name == key
    assert len(key) < 255
    assert not set(key) & set('\\/:*?"<>|')
    assert _reference_of(key) == one
    assert (key == _key_of(other)) == (one == other)
