"""Switch of a context's evaluation callback: off for computations that need none, where this release lets it be found.

With a callback llama.cpp asks about every tensor and computes in pieces; a context takes it for good when it is made.
It is asked for anew whenever a graph is built, though, and a graph serves one number of rows: so it can be off for
one row and on for several.
"""

from __future__ import annotations

import ctypes
from typing import Any

_PARAMETERS = "_ZNK13llama_context11get_cparamsEv"
"""Where a context keeps what it was made with; in no header."""
_SEARCHED_WORDS = 64


class CallbackSwitch:
    """Of a context that was made with `callback`. Where its place is not found, the callback stays on."""

    def __init__(self, library: Any, context: int, callback: Any) -> None:
        self._address = ctypes.cast(callback, ctypes.c_void_p).value or 0
        self._place: Any = None
        find = getattr(library, _PARAMETERS, None)
        if find is not None:
            find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            words = (ctypes.c_uint64 * _SEARCHED_WORDS).from_address(find(context))
            places = [place for place, word in enumerate(words) if word == self._address]
            if len(places) == 1:
                self._place = ctypes.c_uint64.from_buffer(words, 8 * places[0])

    @property
    def is_found(self) -> bool:
        return self._place is not None

    def set(self, is_on: bool) -> None:
        if self._place is not None:
            self._place.value = self._address if is_on else 0
