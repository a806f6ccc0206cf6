"""The hash table in process: records that hold, others that do not, dead nodes, and what strangers may make it keep."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import UsageError
from shardcompute.node.discovery.dht.messages import (
    MOST_DATAGRAM_BYTES,
    Body,
    Contact,
    FindRecord,
    KeepRecord,
    Neighbours,
    RecordKept,
    decode,
    encode,
)
from shardcompute.node.discovery.dht.node import Address, DhtNode
from shardcompute.node.discovery.dht.records import (
    MOST_LIFE_S,
    MOST_RECORD_BYTES,
    SignedRecord,
    Whereabout,
    fitted,
    newer,
    record_key,
    sign_record,
)
from shardcompute.node.discovery.dht.table import BUCKET, RoutingTable
from shardcompute.node.discovery.dht.udp import (
    MOST_PER_HOST,
    MOST_PER_SECOND,
    AnswerLimit,
    DhtSocket,
    parse_bootstrap,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
HOME = Whereabout(("tcp://10.0.0.1:7420",), ("tcp://10.0.0.2:7423",), ("tcp://10.0.0.3:7430",))
NOW_S = 1_000_000.0
NUMBER = b"12345678"


def signed(
    sequence: int = 1, whereabout: Whereabout = HOME, key: Ed25519PrivateKey = KEY, life_s: float = 3600.0
) -> SignedRecord:
    return sign_record(key, whereabout, sequence=sequence, life_s=life_s, clock=lambda: NOW_S)


@dataclass
class Net:
    """Nodes that ask each other by calling; some are dead."""

    nodes: dict[Address, DhtNode] = field(default_factory=dict)
    dead: set[Address] = field(default_factory=set)
    now_s: float = NOW_S
    asked: int = 0

    def add(self, number: int, **options: int) -> DhtNode:
        address = (f"10.0.{number // 250}.{number % 250 + 1}", 7422)
        rng = random.Random(number)

        def ask(to: Address, body: Body) -> tuple[bytes, Body] | None:
            self.asked += 1
            if to in self.dead or to not in self.nodes:
                return None
            content = encode(NUMBER, node.node_id, body)
            assert len(content) <= MOST_DATAGRAM_BYTES
            reply = self.nodes[to].answer(content, address)
            said = None if reply is None else decode(reply)
            return None if said is None else (said.sender, said.body)

        node = DhtNode(ask, node_id=rng.randbytes(20), clock=lambda: self.now_s, **options)
        self.nodes[address] = node
        return node

    def grow(self, count: int) -> list[DhtNode]:
        """A network in which all know the first and find each other through it."""
        added = [self.add(number) for number in range(count)]
        first = next(iter(self.nodes))
        for node in added[1:]:
            node.bootstrap([first])
            for each in added:
                each.greet_newcomers()
        return added


@pytest.fixture
def net() -> Net:
    return Net()


def test_a_record_says_where_a_cluster_is_to_whoever_knows_its_key(net: Net) -> None:
    nodes = net.grow(20)
    assert nodes[3].publish(signed()) == BUCKET
    found = nodes[17].lookup(record_key(PUBLIC))
    assert found is not None
    assert found.read() == HOME
    assert nodes[17].lookup(record_key(bytes(32))) is None


def test_the_first_node_answers_for_its_own_record(net: Net) -> None:
    first = net.add(0)
    first.bootstrap(net.nodes)
    assert first.publish(signed()) == 0
    member = net.add(1)
    member.bootstrap(net.nodes)
    found = member.lookup(record_key(PUBLIC))
    assert found is not None
    assert found.read() == HOME


def test_a_record_is_found_though_a_third_of_the_nodes_are_dead(net: Net) -> None:
    nodes = net.grow(40)
    nodes[3].publish(signed())
    alive = {3, 17, 0}
    addresses = list(net.nodes)
    others = [address for number, address in enumerate(addresses) if number not in alive]
    net.dead = set(random.Random(1).sample(others, len(addresses) * 3 // 10))
    before = net.asked
    found = nodes[17].lookup(record_key(PUBLIC))
    assert found is not None
    assert found.read() == HOME
    assert net.asked - before <= 40
    assert nodes[3].publish(signed(sequence=2)) > 0
    again = nodes[17].lookup(record_key(PUBLIC))
    assert again is not None
    assert again.sequence == 2


def store(node: DhtNode, record: SignedRecord, sender: Address = ("10.9.9.9", 1)) -> bool:
    """As a stranger who keeps to the protocol."""
    asked = decode(node.answer(encode(NUMBER, bytes(20), FindRecord(record.key)), sender) or b"")
    assert asked is not None
    assert isinstance(asked.body, Neighbours)
    reply = decode(
        node.answer(encode(NUMBER, bytes(20), KeepRecord(record, asked.body.token)), sender) or b""
    )
    assert reply is not None
    assert isinstance(reply.body, RecordKept)
    return reply.body.is_kept


def forged() -> list[SignedRecord]:
    good = signed(5)
    change = msgspec.structs.replace
    stranger = signed(9, key=Ed25519PrivateKey.generate())
    return [
        change(good, sequence=6),
        change(good, expires_at_s=good.expires_at_s + 1),
        change(good, content=good.content[:-1] + b"x"),
        change(good, signature=bytes(64)),
        change(good, signature=b""),
        change(stranger, public_key=PUBLIC),
        change(good, public_key=b"short"),
        change(good, public_key=bytes(32)),
        signed(7, life_s=-1.0),
        signed(7, life_s=3 * MOST_LIFE_S),
    ]


@pytest.mark.parametrize("number", range(10))
def test_forged_and_expired_records_are_neither_kept_nor_believed(net: Net, number: int) -> None:
    record = forged()[number]
    node = net.add(1)
    assert not record.check(NOW_S)
    assert not store(node, record)
    assert node.kept_records == 0
    # A node that hands such a record out is not believed either.
    liar = net.add(2)
    liar._records[record.key] = liar._records[record_key(PUBLIC)] = record
    node.bootstrap([list(net.nodes)[1]])
    assert node.lookup(record_key(PUBLIC)) is None


def test_old_records_do_not_come_back(net: Net) -> None:
    node = net.add(1)
    assert store(node, signed(2))
    assert not store(node, signed(1))
    assert store(node, signed(2))
    assert store(node, signed(3))
    net.now_s += 3601.0
    assert node.lookup(record_key(PUBLIC)) is None
    assert node.kept_records == 0


def test_of_several_answers_the_newest_counts(net: Net) -> None:
    nodes = net.grow(10)
    nodes[1].publish(signed(1))
    for node in nodes[5:]:
        node._records[record_key(PUBLIC)] = signed(7)
    found = nodes[2].lookup(record_key(PUBLIC))
    assert found is not None
    assert found.sequence == 7
    assert newer(signed(3), signed(3, Whereabout(("tcp://evil:1",)))) == signed(3)


def test_records_that_are_too_large_cannot_be_made_or_sent() -> None:
    large = Whereabout(tuple(f"tcp://{'h' * 90}{number}:1" for number in range(20)))
    with pytest.raises(UsageError, match="too large"):
        signed(1, large)
    record = msgspec.structs.replace(signed(), content=bytes(1001))
    assert not record.check(NOW_S)
    assert decode(encode(NUMBER, bytes(20), KeepRecord(record, b"t")) + bytes(400)) is None


def test_an_answer_has_room_for_the_largest_record_and_eight_contacts() -> None:
    record = msgspec.structs.replace(signed(2**62), content=bytes(MOST_RECORD_BYTES))
    contacts = tuple(Contact(bytes(20), "f" * 39, 65_535) for _ in range(8))
    answer = encode(NUMBER, bytes(20), Neighbours(contacts, bytes(8), record))
    assert len(answer) <= len(encode(NUMBER, bytes(20), FindRecord(bytes(20)))) <= MOST_DATAGRAM_BYTES
    assert decode(answer) is not None
    assert len(encode(NUMBER, bytes(20), KeepRecord(record, bytes(8)))) <= MOST_DATAGRAM_BYTES


def test_what_a_record_cannot_hold_is_left_out_holders_first() -> None:
    many = [tuple(f"tcp://{name}-{number:02}.example.org:7420" for number in range(12)) for name in "crh"]
    fit = fitted(Whereabout(*many))
    signed(1, fit)
    assert fit.coordinators == many[0][:8]
    assert len(fit.relays) > len(fit.holders)


def test_only_addresses_are_read_out_of_a_record() -> None:
    odd = Whereabout(
        ("tcp://a:1", "http://b", "tcp://\x1b[2J:1", "tcp://a:1", *(f"tcp://{n}:1" for n in range(20)))
    )
    assert signed(1, odd).read().coordinators[:2] == ("tcp://a:1", "tcp://0:1")
    assert len(signed(1, odd).read().coordinators) == 8
    for content in (b"", b"\xc1", msgspec.msgpack.encode([["x"], 1, 2]), msgspec.msgpack.encode({"a": 1})):
        assert msgspec.structs.replace(signed(), content=content).read() == Whereabout()


def test_a_node_keeps_a_bounded_number_of_records_and_those_nearest(net: Net) -> None:
    node = net.add(1, most_records=5)
    keys = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 12)]
    for key in keys:
        store(node, signed(key=key))
    assert node.kept_records == 5


def test_who_forges_an_address_stores_nothing(net: Net) -> None:
    node = net.add(1)
    given = decode(node.answer(encode(NUMBER, bytes(20), FindRecord(bytes(20))), ("10.9.9.9", 1)) or b"")
    assert given is not None
    assert isinstance(given.body, Neighbours)
    elsewhere = node.answer(
        encode(NUMBER, bytes(20), KeepRecord(signed(), given.body.token)), ("10.8.8.8", 1)
    )
    assert decode(elsewhere or b"") == decode(encode(NUMBER, node.node_id, RecordKept(False)))
    net.now_s += 1000.0
    late = node.answer(encode(NUMBER, bytes(20), KeepRecord(signed(), given.body.token)), ("10.9.9.9", 1))
    assert decode(late or b"") == decode(encode(NUMBER, node.node_id, RecordKept(False)))


def test_nobody_gets_more_bytes_than_he_sends(net: Net) -> None:
    nodes = net.grow(20)
    nodes[1].publish(signed())
    for node in nodes:
        request = encode(NUMBER, bytes(20), FindRecord(record_key(PUBLIC)))
        assert len(node.answer(request, ("10.9.9.9", 1)) or b"") <= len(request)
        bare = msgspec.msgpack.encode([1, NUMBER, bytes(20), [1, record_key(PUBLIC)], b""])
        assert decode(bare) is not None
        assert len(node.answer(bare, ("10.9.9.9", 1)) or b"") <= len(bare)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=1500))
def test_whatever_comes_is_answered_by_nothing_or_little(content: bytes) -> None:
    node = Net().add(1)
    reply = node.answer(content, ("10.9.9.9", 1))
    assert reply is None or len(reply) <= len(content)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1390), st.binary(min_size=1, max_size=8), st.booleans())
def test_mutated_messages_change_nothing_that_was_signed(at: int, change: bytes, is_store: bool) -> None:
    net = Net()
    node = net.add(1)
    store(node, signed(5))
    body: Body = KeepRecord(signed(6), bytes(8)) if is_store else FindRecord(record_key(PUBLIC))
    content = encode(NUMBER, bytes(20), body)
    node.answer(content[:at] + change + content[at + len(change) :], ("10.9.9.9", 1))
    assert node.lookup(record_key(PUBLIC)) == signed(5)


def test_newcomers_do_not_push_out_who_answers() -> None:
    table = RoutingTable(bytes(20))
    far = [Contact(b"\xff" + bytes(18) + bytes([number]), f"10.0.0.{number}", 1) for number in range(20)]
    for contact in far:
        table.heard(contact)
    assert len(table) == BUCKET
    assert set(table.nearest(bytes(20))) == set(far[:BUCKET])
    table.failed(far[0].node_id)
    table.heard(far[10])
    assert far[10] in table.nearest(bytes(20))
    assert far[0] not in table.nearest(bytes(20))


def test_one_host_is_few_of_those_one_knows() -> None:
    table = RoutingTable(bytes(20))
    for number in range(20):
        table.heard(Contact(b"\xff" + bytes(18) + bytes([number]), "10.0.0.1", number + 1))
    assert len(table) == 2
    known = table.nearest(bytes(20))[0]
    table.heard(Contact(known.node_id, "10.6.6.6", 1))
    assert known in table.nearest(bytes(20))


def test_answers_are_limited_by_the_second() -> None:
    now = [0.0]
    limit = AnswerLimit(lambda: now[0])
    assert sum(limit.allows("a") for _ in range(100)) == MOST_PER_HOST
    assert sum(limit.allows(f"h{number % 50}") for number in range(1000)) == MOST_PER_SECOND - MOST_PER_HOST
    now[0] = 1.0
    assert limit.allows("a")


def test_real_sockets_find_a_record() -> None:
    with DhtSocket("127.0.0.1", 0, most_per_host=9) as one, DhtSocket("127.0.0.1", 0, most_per_host=9) as two:
        place = [("127.0.0.1", one.port)]
        assert two.node.bootstrap(place) == 1
        record = sign_record(KEY, HOME, sequence=1)
        assert two.node.publish(record) == 1
        with DhtSocket("127.0.0.1", 0) as member:
            member.node.bootstrap(place)
            assert member.node.lookup(record.key) == record


def test_bootstrap_nodes_are_addresses() -> None:
    assert parse_bootstrap(["127.0.0.1:7422", "no-such-name.invalid:1", "x", "127.0.0.1:x"]) == [
        ("127.0.0.1", 7422)
    ]
