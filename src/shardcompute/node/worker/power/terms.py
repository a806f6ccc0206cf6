"""Power terms of a worker: what its owner says that its machine draws and costs, and who shares that. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PowerTerms:
    """None: the owner does not say. `sharers`: so many workers share what the machine's counters say."""

    watts: float | None = None
    price_per_hour: float | None = None
    sharers: int = 1

    def shared_by(self, count: int) -> PowerTerms:
        """Each one's part where so many workers share the machine."""
        return replace(
            self,
            watts=None if self.watts is None else self.watts / count,
            price_per_hour=None if self.price_per_hour is None else self.price_per_hour / count,
            sharers=self.sharers * count,
        )

    def arguments(self) -> tuple[str, ...]:
        """For the command line of a worker of ours."""
        given = (("--watts", self.watts), ("--price-hour", self.price_per_hour))
        said = tuple(part for name, value in given if value is not None for part in (name, str(value)))
        return (*said, "--power-sharers", str(self.sharers)) if self.sharers > 1 else said
