"""Pictures on their way to the chain: whole, once, and again where it was lost; bounded by what they cost."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from shardcompute.core.errors import QueueFullError, ShardComputeError, UnsupportedModelError, UsageError
from shardcompute.core.generation import GenerationRequest
from shardcompute.core.pictures import Picture, PictureSpan
from shardcompute.core.steps import Opening
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import DriverLimits
from shardcompute.node.rpc.session_ids import Resumption
from support.pictures import EYES, picture
from support.swarm.fake_chain import LETTERS, PIPELINE, Caller, FakeChain, continuation, make_driver, submit

SHARING = replace(PIPELINE, can_share=True)
LIMITS = DriverLimits(LETTERS + 1, 4096, vision=EYES)


def seeing(*pictures: Picture, length: int = 50, max_tokens: int = 5, **options: Any) -> GenerationRequest:
    return GenerationRequest(tuple(i % 20 for i in range(length)), max_tokens, pictures=pictures, **options)


def connected_to(shape: Any = PIPELINE, limits: DriverLimits = LIMITS) -> tuple[Driver, FakeChain]:
    given = {each.name: getattr(limits, each.name) for each in fields(limits)}
    driver, chain = make_driver(**given), FakeChain()
    driver.connect(chain, shape)
    return driver, chain


def run(driver: Driver, chain: FakeChain, request: GenerationRequest) -> Caller:
    _, caller = submit(driver, request)
    chain.run(driver)
    assert caller.tokens == continuation(request.prompt, request.max_tokens)
    return caller


def cached(caller: Caller) -> int:
    timings = caller.deltas[-1].timings
    assert timings is not None
    return timings.cached_tokens


def openings(chain: FakeChain) -> list[Opening]:
    return [opening for frame in chain.frames for opening in frame.openings]


def edges(chain: FakeChain, session: int) -> set[int]:
    return {part.start for part in chain.sent_to(session)}


def test_patches_and_spans_travel_with_the_opening_alone() -> None:
    driver, chain = connected_to()
    request = seeing(picture(2, 1), picture(20, 2))
    run(driver, chain, request)
    [opening] = openings(chain)
    assert opening.spans == tuple(each.span for each in request.pictures)
    assert opening.patches == tuple(each.patches for each in request.pictures)


@pytest.mark.parametrize("start", range(10, 18))
def test_no_step_ends_inside_a_picture_whose_rows_see_each_other(start: int) -> None:
    driver, chain = connected_to()
    session, caller = submit(driver, seeing(picture(start), picture(start + 4), picture(start + 20)))
    chain.run(driver)
    assert caller.is_over
    for first in (start, start + 4, start + 20):
        assert not edges(chain, session) & set(range(first + 1, first + 4))
    assert chain.most_rows <= PIPELINE.max_rows


def test_a_picture_may_take_more_rows_than_others_leave_room_for() -> None:
    wide = replace(PIPELINE, max_rows=600, max_logit_rows=64)
    large = replace(EYES, size=replace(EYES.size, edge=20))
    rows = Picture(PictureSpan(1, 100, (1, 10, 10)), bytes(100 * EYES.patch_bytes), "large")
    driver, chain = connected_to(wide, replace(LIMITS, vision=large))
    submit(driver, seeing(length=3, max_tokens=50, prompt_logprobs=None))
    chain.run(driver, steps=3)
    session, caller = submit(driver, seeing(rows, length=200))
    chain.run(driver)
    assert caller.is_over
    assert not edges(chain, session) & set(range(2, 101))


def test_pictures_that_may_be_cut_are() -> None:
    driver, chain = connected_to(limits=replace(LIMITS, vision=replace(EYES, is_bidirectional=False)))
    session, _ = submit(driver, seeing(picture(14)))
    chain.run(driver)
    assert 16 in edges(chain, session)


def test_a_frame_has_the_pictures_of_one_session() -> None:
    driver, chain = connected_to(replace(PIPELINE, max_rows=600))
    callers = [submit(driver, seeing(picture(2, shade), length=20))[1] for shade in range(3)]
    chain.run(driver)
    assert all(caller.is_over for caller in callers)
    assert max(sum(bool(each.patches) for each in frame.openings) for frame in chain.frames) == 1
    assert len(openings(chain)) == 3


def test_a_conversation_about_a_picture_goes_on_without_sending_it_again() -> None:
    driver, chain = connected_to(SHARING)
    first = seeing(picture(2, 1))
    run(driver, chain, first)
    later = seeing(
        picture(2, 1),
        picture(60, 2),
        length=70,
    )
    prompt = (*first.prompt, *continuation(first.prompt, 5), *later.prompt[55:])
    caller = run(driver, chain, replace(later, prompt=prompt))
    assert cached(caller) == 54
    assert [len(each) for each in openings(chain)[1].patches] == [0, len(picture(0).patches)]
    assert len(openings(chain)[1].spans) == 2


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ((picture(40, 1),), 49),
        ((picture(40, 2),), 40),
        ((picture(39, 1),), 39),
        ((), 40),
        ((picture(34, 1), picture(40, 1)), 34),
    ],
)
def test_equal_placeholders_of_other_pictures_are_not_shared(
    other: tuple[Picture, ...], expected: int
) -> None:
    driver, chain = connected_to(SHARING)
    run(driver, chain, seeing(picture(40, 1)))
    assert cached(run(driver, chain, seeing(*other))) == expected


def test_a_running_session_shares_by_what_it_sees_too() -> None:
    driver, chain = connected_to(SHARING)
    submit(driver, seeing(picture(40, 1), max_tokens=50))
    chain.run(driver, steps=10)
    assert cached(run(driver, chain, seeing(picture(40, 2)))) == 40


def test_part_of_a_picture_is_not_shared() -> None:
    driver, chain = connected_to(SHARING)
    run(driver, chain, seeing(picture(40, 1), length=60))
    different = seeing(picture(40, 1), length=60)
    prompt = (*different.prompt[:42], 19, *different.prompt[43:])
    assert cached(run(driver, chain, replace(different, prompt=prompt))) == 40


def test_a_prefix_that_is_gone_is_computed_with_all_patches() -> None:
    driver, chain = connected_to(SHARING)
    run(driver, chain, seeing(picture(2, 1)))
    chain.forgets_sources = True
    assert cached(run(driver, chain, seeing(picture(2, 1)))) == 0
    assert openings(chain)[-1].patches == (picture(2, 1).patches,)


@pytest.mark.parametrize("start", [2, 5, 9, 13, 14, 15, 30])
def test_a_lost_chain_is_shown_whole_pictures_again_one_session_at_a_time(start: int) -> None:
    driver, chain = connected_to()
    talks = [submit(driver, seeing(picture(start, shade), max_tokens=40)) for shade in range(3)]
    while not all(caller.tokens for _, caller in talks):
        chain.run(driver, steps=1)
    assert not any(caller.is_over for _, caller in talks)
    driver.disconnect()
    other = FakeChain()
    driver.connect(other, PIPELINE)
    other.run(driver)
    assert len(openings(other)) == 3
    assert max(sum(bool(each.patches) for each in frame.openings) for frame in other.frames) == 1
    for shade, (session, caller) in enumerate(talks):
        assert caller.tokens == continuation(seeing().prompt, 40)
        [opening] = [each for each in openings(other) if each.session == session]
        assert opening.patches == (picture(start, shade).patches,)
        assert not edges(other, session) & set(range(start + 1, start + 4))


def test_a_new_first_stage_is_replayed_whole_pictures() -> None:
    driver, chain = connected_to()
    session, _ = submit(driver, seeing(picture(14, 1), max_tokens=20))
    chain.run(driver, steps=8)
    driver.disconnect()
    other = FakeChain()
    resumption = Resumption(has_new_first=True, lengths=None)
    driver.connect(other, PIPELINE, resumption)
    starts = [work.start for work, _ in other.replayed]
    assert other.replayed[0][0].session == session
    assert starts[:3] == [0, 14, 30]
    assert other.replayed[0][1] is not None
    assert other.replayed[0][1].patches == (picture(14, 1).patches,)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (seeing(picture(48)), "outside of its prompt"),
        (seeing(picture(2), picture(4)), "overlaps"),
        (seeing(replace(picture(2), patches=b"short")), "bytes"),
        (seeing(replace(picture(2), span=PictureSpan(2, 3, (1, 2, 2)))), "none of this model's"),
        (seeing(replace(picture(2), span=PictureSpan(2, 4, (1, 1, 4)))), "none of this model's"),
        (seeing(picture(2), prompt_logprobs=0), "log-probabilities"),
    ],
)
def test_what_is_no_picture_of_the_prompt_is_refused(request_: GenerationRequest, says: str) -> None:
    driver, _ = connected_to()
    with pytest.raises(UsageError, match=says):
        submit(driver, request_)


def test_a_model_without_eyes_refuses_pictures() -> None:
    driver, _ = connected_to(limits=replace(LIMITS, vision=None))
    with pytest.raises(UsageError, match="does not see"):
        submit(driver, seeing(picture(2)))


def test_pictures_that_wait_take_no_more_memory_than_there_is() -> None:
    size = len(picture(0).patches)
    driver, chain = connected_to(limits=replace(LIMITS, max_picture_bytes=2 * size))
    first, _ = submit(driver, seeing(picture(2)))
    submit(driver, seeing(picture(2)))
    with pytest.raises(QueueFullError, match="pictures"):
        submit(driver, seeing(picture(2)))
    submit(driver, seeing())
    driver.cancel(first)
    submit(driver, seeing(picture(2)))
    chain.run(driver)


def test_others_are_sent_on_while_pictures_are_looked_at() -> None:
    driver, chain = connected_to(replace(PIPELINE, stages=1))
    _, talking = submit(driver, seeing(length=4, max_tokens=30))
    chain.run(driver, steps=3)
    shown, looking = submit(driver, seeing(picture(2), length=200))
    _, second = submit(driver, seeing(picture(2, 1)))
    while not any(frame.patches for frame in chain.frames):
        chain.run(driver, steps=1)
    [kept] = [frame for frame in chain.frames if frame.patches]
    chain._inbox.remove(kept)
    chain.run(driver)
    assert talking.tokens == continuation(seeing(length=4).prompt, 30)
    assert not looking.tokens
    assert not second.tokens, "one after the other"
    assert [part.session for frame in chain.frames for part in frame.work].count(shown) == 1
    chain._inbox.append(kept)
    chain.run(driver)
    assert looking.tokens == continuation(seeing(length=200).prompt, 5)
    assert second.tokens == continuation(seeing().prompt, 5)


@pytest.mark.parametrize("kind", [UsageError, UnsupportedModelError])
def test_a_stage_that_refuses_a_picture_disturbs_nobody_else(kind: type[ShardComputeError]) -> None:
    driver, chain = connected_to(replace(PIPELINE, stages=1))
    _, talking = submit(driver, seeing(length=4, max_tokens=30))
    chain.run(driver, steps=3)
    refused, shown = submit(driver, seeing(picture(2)))
    while not shown.is_over:
        while not chain.computed:
            assert chain.compute()
        sequence, _ = chain.computed[0]
        frame = next(each for each in chain.frames if each.sequence == sequence)
        if any(opening.session == refused for opening in frame.openings):
            assert len(frame.work) == 1, "others do not wait for what looks at it"
            chain.forget(refused)
            chain.computed[0] = sequence, kind("this backend takes no pictures")
        chain.deliver(driver)
    assert isinstance(shown.error, kind)
    chain.run(driver)
    assert talking.tokens == continuation(seeing(length=4).prompt, 30)


def test_all_pictures_of_a_prompt_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.node.driver.limits.MAX_PICTURE_BYTES", 50)
    driver, _ = connected_to()
    submit(driver, seeing(picture(2)))
    with pytest.raises(UsageError, match="together"):
        submit(driver, seeing(picture(2), picture(10)))
