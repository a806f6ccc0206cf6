"""Fingerprints of activations: where the largest entries of each row are, and what they are.

Machines that compute with other kernels agree on a row within a little; its largest entries say nearly as much as all
of them, in a small part of the bytes (the idea is TOPLOC's). One machine's fingerprint is compared with another's rows
at the places that it names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOP_ENTRIES = 16
Rows = npt.NDArray[np.float32]
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class RowFingerprint:
    """Of several rows: `places[row]` are the columns of the largest entries in rising order, `values` these entries."""

    places: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float16]

    @property
    def size_bytes(self) -> int:
        return int(self.places.nbytes + self.values.nbytes)

    def to_bytes(self) -> bytes:
        """As a record keeps it: rows, entries of a row, places, values; all little-endian."""
        shape = np.array(self.places.shape, dtype="<u4").tobytes()
        return shape + self.places.astype("<u4").tobytes() + self.values.astype("<f2").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> RowFingerprint:
        """ValueError where these are none."""
        if len(content) < 8:
            raise ValueError("too short for a fingerprint")
        rows, entries = (int(each) for each in np.frombuffer(content[:8], dtype="<u4"))
        count = rows * entries
        if len(content) != 8 + 6 * count:
            raise ValueError(f"{len(content)} bytes are no fingerprint of {rows} rows with {entries} entries")
        places = np.frombuffer(content[8 : 8 + 4 * count], dtype="<u4").reshape(rows, entries)
        values = np.frombuffer(content[8 + 4 * count :], dtype="<f2").reshape(rows, entries)
        return cls(places, values)


def fingerprint_rows(rows: Rows, entries: int = TOP_ENTRIES) -> RowFingerprint:
    """Of each row its largest entries by magnitude."""
    count = min(entries, rows.shape[1])
    largest = np.argpartition(-np.abs(rows), count - 1, axis=1)[:, :count]
    places = np.sort(largest, axis=1)
    with np.errstate(over="ignore"):
        values = np.take_along_axis(rows, places, axis=1).astype(np.float16)
    return RowFingerprint(places.astype(np.uint32), values)


def fingerprint_distance(fingerprint: RowFingerprint, rows: Rows) -> float:
    """How far rows lie from a fingerprint: the median over rows of the relative error at its places. Infinite where
    it is not of such rows."""
    places = fingerprint.places.astype(np.int64)
    if len(places) != len(rows) or not places.size or places.max() >= rows.shape[1]:
        return float("inf")
    said = fingerprint.values.astype(np.float64)
    found = np.take_along_axis(rows, places, axis=1).astype(np.float64)
    return _median_ratio(np.linalg.norm(said - found, axis=1), np.linalg.norm(found, axis=1))


def row_distance(said: Rows, found: Rows) -> float:
    """The same of whole rows."""
    return float(np.median(_row_ratios(said, found)))


def peak_distance(said: Rows, found: Rows) -> float:
    """That of the row which is furthest off: a median says nothing of fewer than half of the rows."""
    return float(np.max(_row_ratios(said, found)))


def _row_ratios(said: Rows, found: Rows) -> npt.NDArray[np.float64]:
    if said.shape != found.shape or not said.size:
        return np.array([np.inf])
    difference = np.linalg.norm(said.astype(np.float64) - found, axis=1)
    return _ratios(difference, np.linalg.norm(found.astype(np.float64), axis=1))


def _median_ratio(difference: npt.NDArray[np.float64], norm: npt.NDArray[np.float64]) -> float:
    return float(np.median(_ratios(difference, norm)))


def _ratios(difference: npt.NDArray[np.float64], norm: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    ratio = difference / np.maximum(norm, _LEAST)
    # What is no number agrees with nothing.
    return np.where(np.isfinite(ratio), ratio, np.inf)
