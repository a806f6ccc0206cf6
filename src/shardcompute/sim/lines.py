"""Rate limit of a line, with a queue in front of it. Time comes in as a number."""

from __future__ import annotations


class Line:
    """One direction of a machine's line. Not for several threads at once."""

    __slots__ = ("bytes_per_s", "free_s", "queue_s")

    def __init__(self, bytes_per_s: float, queue_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.queue_s = queue_s
        self.free_s = 0.0
        """When all that was taken so far is through."""

    def admit(self, now_s: float, size_bytes: int) -> float | None:
        """When a packet that comes now is through; None if the queue is full and it is dropped."""
        start_s = self.free_s if self.free_s > now_s else now_s
        if start_s - now_s > self.queue_s:
            return None
        self.free_s = start_s + size_bytes / self.bytes_per_s
        return self.free_s

    def append(self, now_s: float, size_bytes: int) -> float:
        """The same for senders that wait rather than lose anything."""
        start_s = self.free_s if self.free_s > now_s else now_s
        self.free_s = start_s + size_bytes / self.bytes_per_s
        return self.free_s

    def retune(self, bytes_per_s: float, queue_s: float, now_s: float) -> None:
        """From now on another rate; what waits goes on at the new one."""
        waiting_bytes = max(0.0, self.free_s - now_s) * self.bytes_per_s
        self.bytes_per_s, self.queue_s = bytes_per_s, queue_s
        self.free_s = now_s + waiting_bytes / bytes_per_s
