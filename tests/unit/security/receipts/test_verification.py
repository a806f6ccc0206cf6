"""A receipt that fits says who signed for what; one that does not is refused with the field that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.security import Role
from shardcompute.security.receipts import (
    Receipt,
    ReceiptError,
    StageTranscript,
    read_receipt,
    sign_receipt,
    verify_receipt,
    write_receipt,
)
from shardcompute.security.receipts.records import commitment_bytes
from shardcompute.security.receipts.trust import authority_by_fingerprint, read_authority
from support.paper_chain import PaperChain, interrupted_receipt, plain_receipt, tokens_of


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[PaperChain, Receipt]:
    return plain_receipt(tmp_path_factory.mktemp("plain"))


def refusal(receipt: Receipt, authority: str = "") -> str:
    with pytest.raises(ReceiptError) as caught:
        verify_receipt(receipt, authority or receipt.authority)
    return caught.value.field


def signed_again(chain: PaperChain, receipt: Receipt) -> Receipt:
    """As a driver would that changes what stages say."""
    return sign_receipt(receipt, chain.driver.sign)


def test_an_undisturbed_answer(plain: tuple[PaperChain, Receipt]) -> None:
    chain, receipt = plain
    verdict = verify_receipt(receipt, chain.authority.certificate_pem)
    assert verdict.fingerprint == chain.authority.fingerprint
    assert set(verdict.nodes) == {*chain.nodes, chain.driver.node_id}
    assert (verdict.rows, verdict.picked, verdict.unsigned) == (99, 60, ())
    assert read_receipt(write_receipt(receipt)) == receipt


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_machine_lost_amid_an_answer(tmp_path: Path, stage: int, drafts: int) -> None:
    chain, receipt = interrupted_receipt(tmp_path, stage, drafts)
    verdict = verify_receipt(receipt, receipt.authority)
    lost = chain.lost[0].identity.node_id
    assert [(each.node, each.start, each.stop) for each in verdict.unsigned] == [(lost, 64, 90)]
    assert verdict.epochs == (3, 4)
    assert {lost, *chain.nodes} < set(verdict.nodes)
    assert verdict.picked == (74 if stage == 2 else 100), (
        "who picked and was lost has not signed for all of it"
    )


def test_a_stage_lost_with_drafts_signed_for_is_no_liar(tmp_path: Path) -> None:
    """It signed for a block of drafts that were wrong, and was lost before it could sign for what took their place."""
    chain = PaperChain(tmp_path)
    chain.begin(tokens_of(140), 40)
    rows = chain.decode(40, 60)
    chain.step(60, [5] * 6, [9] * 6)
    chain.step(66, [5], [9])
    lost = chain.stages[1]
    assert (lost.signed[-1].start, lost.signed[-1].stop) == (32, 64)
    chain.silent = 1
    rows = chain.decode(rows, 70)
    chain.lose(1, rows)
    chain.cut(chain.decode(rows, 139))
    receipt = chain.receipt()
    verdict = verify_receipt(receipt, receipt.authority)
    node = lost.identity.node_id
    assert [(each.node, each.start, each.stop) for each in verdict.unsigned] == [(node, 32, 70)]


def test_another_clusters(plain: tuple[PaperChain, Receipt], tmp_path: Path) -> None:
    other = PaperChain(tmp_path)
    assert refusal(plain[1], other.authority.certificate_pem) == "authority"
    foreign = {**plain[1].certificates, plain[0].nodes[0]: other.stages[0].certificate}
    assert refusal(replace(plain[1], certificates=foreign)).startswith("certificates.")


def test_a_driver_that_changes_the_answer(plain: tuple[PaperChain, Receipt]) -> None:
    chain, receipt = plain
    tokens = [*receipt.tokens]
    tokens[50] += 1
    field = refusal(signed_again(chain, replace(receipt, tokens=tokens)))
    assert field == "transcripts[0].commitments[1].inputs[0]", "the first stage got another token"
    tokens = [*receipt.tokens]
    tokens[-1] += 1
    field = refusal(signed_again(chain, replace(receipt, tokens=tokens)))
    assert field == "transcripts[2].commitments[3].outputs[0]", "the last stage picked another token"


def test_a_driver_that_leaves_a_stage_out(plain: tuple[PaperChain, Receipt]) -> None:
    chain, receipt = plain
    fewer = replace(receipt, transcripts=receipt.transcripts[:2])
    assert refusal(signed_again(chain, fewer)) == "runs[0].nodes"
    short = [*receipt.transcripts[:1], _cut_short(receipt.transcripts[1]), *receipt.transcripts[2:]]
    assert refusal(signed_again(chain, replace(receipt, transcripts=short))) == "transcripts[1].commitments"
    run = replace(receipt.runs[0], nodes=receipt.runs[0].nodes[:2])
    field = refusal(signed_again(chain, replace(receipt, runs=[run])))
    assert field == "transcripts[1].header.claim.is_last"


def _cut_short(transcript: StageTranscript) -> StageTranscript:
    return replace(transcript, commitments=transcript.commitments[:-1])


def test_a_stage_that_says_it_got_something_else(plain: tuple[PaperChain, Receipt]) -> None:
    """It signs for that, too: what convicts it is what its neighbour signed for."""
    chain, receipt = plain
    middle = receipt.transcripts[1]
    last = middle.commitments[-1]
    lie = replace(last, inputs=[bytes(32)], signature=b"")
    lie = replace(lie, signature=chain.stages[1].identity.sign(commitment_bytes(middle.header, lie)))
    lied = replace(middle, commitments=[*middle.commitments[:-1], lie])
    told = [receipt.transcripts[0], lied, receipt.transcripts[2]]
    field = refusal(signed_again(chain, replace(receipt, transcripts=told)))
    assert field == f"transcripts[1].commitments[{len(middle.commitments) - 1}].inputs[0]"


def test_a_key_that_is_not_the_stages_own(plain: tuple[PaperChain, Receipt]) -> None:
    chain, receipt = plain
    first = receipt.transcripts[0]
    forged = replace(
        first.commitments[0],
        signature=chain.stages[1].identity.sign(commitment_bytes(first.header, first.commitments[0])),
    )
    told = [replace(first, commitments=[forged, *first.commitments[1:]]), *receipt.transcripts[1:]]
    field = refusal(signed_again(chain, replace(receipt, transcripts=told)))
    assert field == "transcripts[0].commitments[0].signature"


def test_a_member_that_may_not_compute(plain: tuple[PaperChain, Receipt]) -> None:
    chain, receipt = plain
    node = chain.nodes[0]
    identity = chain.stages[0].identity
    pem = chain.authority.issue(
        identity.certificate_request(), node_id=node, roles={Role.DRIVER}, now_s=receipt.issued_s
    )
    demoted = replace(receipt, certificates={**receipt.certificates, node: pem})
    assert refusal(signed_again(chain, demoted)) == "transcripts[0].header.claim.node"


def test_rows_of_an_earlier_answer_cannot_be_passed_off(tmp_path: Path) -> None:
    """What was signed for one receipt is worth nothing in another."""
    chain, receipt = plain_receipt(tmp_path)
    other = replace(receipt, id="rcpt-" + "0" * 32)
    assert refusal(signed_again(chain, other)) == "transcripts[0].header.receipt"


def _spoil_certificate(receipt: Receipt) -> Receipt:
    node = receipt.runs[0].nodes[0]
    return replace(receipt, certificates={**receipt.certificates, node: "no certificate"})


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("signature", lambda receipt: replace(receipt, signature=bytes(64))),
        ("issued_s", lambda receipt: replace(receipt, issued_s=1)),
        ("issued_s", lambda receipt: replace(receipt, issued_s=(1 << 63) - 1)),
        ("driver", lambda receipt: replace(receipt, driver="nobody")),
        ("cluster", lambda receipt: replace(receipt, cluster="other")),
        ("prompt_tokens", lambda receipt: replace(receipt, prompt_tokens=0)),
        ("given_tokens", lambda receipt: replace(receipt, given_tokens=39)),
        ("reused_rows", lambda receipt: replace(receipt, reused_rows=1)),
        ("transcripts[0].header.claim.model", lambda receipt: replace(receipt, model="other")),
        ("transcripts[0].header.adapter", lambda receipt: replace(receipt, adapter="other")),
        ("runs[0].stop", lambda receipt: replace(receipt, runs=[replace(receipt.runs[0], stop=98)])),
        ("runs[0].nodes", lambda receipt: replace(receipt, runs=[replace(receipt.runs[0], nodes=["n"])])),
    ],
)
def test_the_field_is_named(
    plain: tuple[PaperChain, Receipt], field: str, spoil: Callable[[Receipt], Receipt]
) -> None:
    assert refusal(spoil(plain[1])) == field


def test_a_certificate_that_is_none(plain: tuple[PaperChain, Receipt]) -> None:
    assert refusal(_spoil_certificate(plain[1])) == f"certificates.{plain[0].nodes[0]}"


def test_files_that_are_no_receipts(plain: tuple[PaperChain, Receipt]) -> None:
    content = write_receipt(plain[1])
    for spoilt in (b"", b"{}", content[:-40], content.replace(b'"driver"', b'"owner"'), b"[" * 100_000):
        with pytest.raises(SourceError):
            read_receipt(spoilt)
    with pytest.raises(SourceError, match="too long"):
        read_receipt(bytes(33 << 20))
    longer = content.replace(b'"cluster":', b'"more": 1, "cluster":')
    with pytest.raises(SourceError, match="more"):
        read_receipt(longer)


def test_trust_by_file_and_by_fingerprint(plain: tuple[PaperChain, Receipt]) -> None:
    chain, receipt = plain
    root = chain.authority.certificate_pem
    own = (chain.folder / "authority" / "authority.pem").read_bytes()
    assert read_authority(own, "authority.pem") == root
    assert read_authority((chain.stages[0].certificate + root).encode(), "certificate.pem") == root
    for none in (b"", b"text", chain.stages[0].certificate.encode()):
        with pytest.raises(SourceError, match=r"certificate\.pem"):
            read_authority(none, "certificate.pem")
    assert authority_by_fingerprint(receipt, chain.authority.fingerprint.upper()) == root
    with pytest.raises(ReceiptError, match="authority"):
        authority_by_fingerprint(receipt, "0" * 64)
    with pytest.raises(UsageError):
        authority_by_fingerprint(receipt, "1234")
