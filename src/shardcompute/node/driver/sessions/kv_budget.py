"""KV budget of one chain: what sessions hold of its memory, what is kept of ended ones, and who must make room.

In tokens of whole pages, and pure bookkeeping: whoever keeps this tells the chain what to forget.
"""

from __future__ import annotations

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.driver.sessions.prefix_cache import PrefixStore
from shardcompute.node.driver.sessions.session import Session, round_to_pages


class KvBudget:
    """Admits sessions while there is room. `running` are those that hold some, by their numbers."""

    def __init__(self, capacity_tokens: int = 0, *, can_share: bool = False) -> None:
        """`can_share`: the chain can begin a session with another's memory, so that of ended ones is kept."""
        self.running: dict[int, Session] = {}
        self.capacity_tokens = capacity_tokens
        self._can_share = can_share
        self._prefixes = PrefixStore()

    @property
    def used_tokens(self) -> int:
        """What the running sessions hold or will need next."""
        return sum(session.held_tokens for session in self.running.values())

    @property
    def free_tokens(self) -> int:
        """What nobody holds; less than nothing where memory was taken away."""
        return self.capacity_tokens - self.used_tokens - self._prefixes.held_tokens

    # The chain

    def connect(self, capacity_tokens: int, *, can_share: bool) -> list[int]:
        """Another chain's memory, where nothing is kept. Returns the sessions that were kept on the one before."""
        self.capacity_tokens, self._can_share = capacity_tokens, can_share
        return self._prefixes.clear()

    def disconnect(self) -> None:
        """There is no chain that could keep what ends meanwhile."""
        self._can_share = False

    # Sessions

    def admit(self, session: Session) -> bool:
        """Give a session room, and the beginning that it shares with another one; False where it has to wait. One
        alone is always admitted."""
        if self.running and _first_need(session) > self.free_tokens:
            return False
        request = session.request
        # Rows that are scored or looked at have to be computed.
        if self._can_share and request.prompt_logprobs is None and not request.sampling.shows_rows:
            prefix = self._prefixes.find(session, self.running.values())
            if prefix is not None:
                session.begin_with(prefix)
        self.running[session.id] = session
        return True

    def kept_tokens(self, request: GenerationRequest) -> int:
        """How much of a prompt's beginning a session would be given."""
        if not self._can_share or request.prompt_logprobs is not None or request.sampling.shows_rows:
            return 0
        return self._prefixes.kept_tokens(request, self.running.values())

    def release(self, session: Session) -> bool:
        """A session gives its room back; whether it had any."""
        return self.running.pop(session.id, None) is not None

    def keep(self, session: Session) -> bool:
        """Keep what an ended session has computed; False if it is not worth it, and the chain is to forget it."""
        return self._can_share and self._prefixes.park(session)

    # Making room

    def make_room(self, following: Session | None) -> list[int]:
        """Give up what is kept where those who run, or the one that follows, need its room. Returns the sessions."""
        needed = PAGE_TOKENS * len(self.running) + (0 if following is None else _first_need(following))
        evicted = []
        while self.free_tokens < needed and (session := self.evict()) is not None:
            evicted.append(session)
        return evicted

    def evict(self) -> int | None:
        """Give up the kept session that was used longest ago; None if there is none."""
        return self._prefixes.evict()

    def evict_all(self) -> list[int]:
        """Give up all that is kept."""
        return self._prefixes.clear()

    def choose_victim(self) -> Session | None:
        """Who is to make room for the others: the youngest; None where one runs alone."""
        return self.running[max(self.running)] if len(self.running) > 1 else None


def _first_need(session: Session) -> int:
    """What a session takes to begin with: its known tokens and the next one."""
    return round_to_pages(len(session.known) + 1)
