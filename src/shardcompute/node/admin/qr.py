"""QR codes (ISO/IEC 18004): a text as a square of dark and light modules, and as an SVG.

Bytes in versions 1 to 40 at error correction level L, with the mask that the standard's penalties choose: what an
invitation needs and no more. Checked against another encoder, module by module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from shardcompute.core.errors import UsageError

Matrix = list[list[bool]]
_ECC_PER_BLOCK = (
    *(7, 10, 15, 20, 26, 18, 20, 24, 30, 18, 20, 24, 26, 30, 22, 24, 28, 30, 28, 28),
    *(28, 28, 30, 30, 26, 28, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30),
)
_BLOCKS = (
    *(1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8),
    *(8, 9, 9, 10, 12, 12, 12, 13, 14, 15, 16, 17, 18, 19, 19, 20, 21, 22, 24, 25),
)
"""Of level L, by version."""
_LEVEL_L = 1
_FINDER_LIKE = ([1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 1])
_MASKS: tuple[Callable[[int, int], bool], ...] = (
    lambda x, y: (x + y) % 2 == 0,
    lambda x, y: y % 2 == 0,
    lambda x, y: x % 3 == 0,
    lambda x, y: (x + y) % 3 == 0,
    lambda x, y: (x // 3 + y // 2) % 2 == 0,
    lambda x, y: x * y % 2 + x * y % 3 == 0,
    lambda x, y: (x * y % 2 + x * y % 3) % 2 == 0,
    lambda x, y: ((x + y) % 2 + x * y % 3) % 2 == 0,
)


def qr_matrix(text: str) -> Matrix:
    """Rows of modules, True for dark, without the quiet zone around them. UsageError for more than 2953 bytes."""
    content = text.encode()
    version = next((each for each in range(1, 41) if _fits(content, each)), None)
    if version is None:
        raise UsageError("this is too long for a QR code", hint="write it out instead")
    symbol = _Symbol(version)
    symbol.draw_codewords(_with_ecc(_data_codewords(content, version), version))
    return min((symbol.masked(number) for number in range(8)), key=penalty)


def qr_svg(text: str, *, border: int = 4) -> str:
    """An SVG of one path, black on white, with the border that readers need."""
    matrix = qr_matrix(text)
    size = len(matrix) + 2 * border
    path = "".join(
        f"M{x + border},{y + border}h{width}v1h-{width}z"
        for y, row in enumerate(matrix)
        for x, width in _runs(row)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" shape-rendering="crispEdges">'
        f'<path fill="#fff" d="M0,0h{size}v{size}h-{size}z"/><path fill="#000" d="{path}"/></svg>'
    )


def _runs(row: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Where dark modules begin, and how many there are side by side."""
    x = 0
    for is_dark, group in groupby(row):
        width = len(list(group))
        if is_dark:
            yield x, width
        x += width


def _raw_modules(version: int) -> int:
    """Modules of a symbol that hold data or error correction."""
    count = (16 * version + 128) * version + 64
    if version >= 2:
        aligned = version // 7 + 2
        count -= (25 * aligned - 10) * aligned - 55
        if version >= 7:
            count -= 36
    return count


def _data_bytes(version: int) -> int:
    return _raw_modules(version) // 8 - _ECC_PER_BLOCK[version - 1] * _BLOCKS[version - 1]


def _length_bits(version: int) -> int:
    return 8 if version < 10 else 16


def _fits(content: bytes, version: int) -> bool:
    return 4 + _length_bits(version) + 8 * len(content) <= 8 * _data_bytes(version)


def _data_codewords(content: bytes, version: int) -> bytes:
    bits = f"0100{len(content):0{_length_bits(version)}b}" + "".join(f"{byte:08b}" for byte in content)
    capacity = 8 * _data_bytes(version)
    bits += "0" * min(4, capacity - len(bits))
    bits += "0" * (-len(bits) % 8)
    words = bytearray(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8))
    while len(words) < capacity // 8:
        words += b"\xec\x11"
    return bytes(words[: capacity // 8])


def _with_ecc(data: bytes, version: int) -> bytes:
    """Blocks with their error correction, interleaved."""
    count, ecc = _BLOCKS[version - 1], _ECC_PER_BLOCK[version - 1]
    total = _raw_modules(version) // 8
    short, longer = total // count - ecc, total % count
    divisor = _divisor(ecc)
    blocks, at = [], 0
    for number in range(count):
        size = short + (number >= count - longer)
        blocks.append((data[at : at + size], _remainder(data[at : at + size], divisor)))
        at += size
    mixed = [block[index] for index in range(short + 1) for block, _ in blocks if index < len(block)]
    mixed += [rest[index] for index in range(ecc) for _, rest in blocks]
    return bytes(mixed)


def _multiply(a: int, b: int) -> int:
    """In GF(2^8) modulo 0x11d."""
    product = 0
    for bit in range(7, -1, -1):
        product = (product << 1) ^ ((product >> 7) * 0x11D)
        product ^= (b >> bit & 1) * a
    return product


def _divisor(degree: int) -> list[int]:
    """The Reed-Solomon generator without its leading 1."""
    result, root = [0] * (degree - 1) + [1], 1
    for _ in range(degree):
        for index in range(degree):
            result[index] = _multiply(result[index], root) ^ (result[index + 1] if index + 1 < degree else 0)
        root = _multiply(root, 2)
    return result


def _remainder(data: bytes, divisor: Sequence[int]) -> list[int]:
    result = [0] * len(divisor)
    for byte in data:
        factor = byte ^ result.pop(0)
        result.append(0)
        result = [
            each ^ _multiply(coefficient, factor) for each, coefficient in zip(result, divisor, strict=True)
        ]
    return result


class _Symbol:
    """A square that is drawn step by step; function modules are no part of what masks change."""

    def __init__(self, version: int) -> None:
        self._version = version
        self.size = 17 + 4 * version
        self._dark: Matrix = [[False] * self.size for _ in range(self.size)]
        self._is_function: Matrix = [[False] * self.size for _ in range(self.size)]
        self._draw_patterns()

    def masked(self, number: int) -> Matrix:
        """The finished symbol with this mask."""
        rows = [
            [
                dark != (not fixed and _MASKS[number](x, y))
                for x, (dark, fixed) in enumerate(zip(row, function, strict=True))
            ]
            for y, (row, function) in enumerate(zip(self._dark, self._is_function, strict=True))
        ]
        for x, y, dark in self._format_modules(number):
            rows[y][x] = dark
        return rows

    def draw_codewords(self, words: bytes) -> None:
        """Upwards and downwards in pairs of columns, from the right, leaving out the timing column."""
        bits = iter([bool(word >> bit & 1) for word in words for bit in range(7, -1, -1)])
        right = self.size - 1
        while right >= 1:
            right -= right == 6
            for step in range(self.size):
                is_upwards = (right + 1) & 2 == 0
                y = self.size - 1 - step if is_upwards else step
                for x in (right, right - 1):
                    if not self._is_function[y][x]:
                        self._dark[y][x] = next(bits, False)
            right -= 2

    def _set(self, x: int, y: int, dark: bool) -> None:
        self._dark[y][x] = dark
        self._is_function[y][x] = True

    def _draw_patterns(self) -> None:
        for at in range(self.size):
            self._set(6, at, at % 2 == 0)
            self._set(at, 6, at % 2 == 0)
        for x, y in ((3, 3), (self.size - 4, 3), (3, self.size - 4)):
            self._draw_finder(x, y)
        centres = self._alignment_centres()
        last = len(centres) - 1
        for i, x in enumerate(centres):
            for j, y in enumerate(centres):
                if (i, j) not in ((0, 0), (0, last), (last, 0)):
                    for dx in range(-2, 3):
                        for dy in range(-2, 3):
                            self._set(x + dx, y + dy, max(abs(dx), abs(dy)) != 1)
        for x, y, _ in self._format_modules(0):
            self._set(x, y, False)
        self._draw_version()

    def _draw_finder(self, x: int, y: int) -> None:
        for dx in range(-4, 5):
            for dy in range(-4, 5):
                if 0 <= x + dx < self.size and 0 <= y + dy < self.size:
                    self._set(x + dx, y + dy, max(abs(dx), abs(dy)) not in (2, 4))

    def _alignment_centres(self) -> list[int]:
        if self._version == 1:
            return []
        count = self._version // 7 + 2
        step = (self._version * 8 + count * 3 + 5) // (count * 4 - 4) * 2
        return [6, *reversed([self.size - 7 - index * step for index in range(count - 1)])]

    def _draw_version(self) -> None:
        if self._version < 7:
            return
        rest = self._version
        for _ in range(12):
            rest = (rest << 1) ^ ((rest >> 11) * 0x1F25)
        bits = self._version << 12 | rest
        for index in range(18):
            a, b = self.size - 11 + index % 3, index // 3
            self._set(a, b, bool(bits >> index & 1))
            self._set(b, a, bool(bits >> index & 1))

    def _format_modules(self, mask: int) -> Iterator[tuple[int, int, bool]]:
        """Level and mask, twice, with the module that is always dark."""
        value = rest = _LEVEL_L << 3 | mask
        for _ in range(10):
            rest = (rest << 1) ^ ((rest >> 9) * 0x537)
        bits = (value << 10 | rest) ^ 0x5412
        edge = self.size - 1
        first = [
            *((8, y) for y in range(6)),
            (8, 7),
            (8, 8),
            (7, 8),
            *((14 - index, 8) for index in range(9, 15)),
        ]
        second = [
            *((edge - index, 8) for index in range(8)),
            *((8, edge - 14 + index) for index in range(8, 15)),
        ]
        for places in (first, second):
            for index, (x, y) in enumerate(places):
                yield x, y, bool(bits >> index & 1)
        yield 8, self.size - 8, True


def penalty(matrix: Matrix) -> int:
    """How hard a symbol is to read, as the standard counts it."""
    size, total = len(matrix), 0
    for line in (*matrix, *map(list, zip(*matrix, strict=True))):
        total += sum(length - 2 for _, group in groupby(line) if (length := len(list(group))) >= 5)
        bits = [int(dark) for dark in line]
        total += 40 * sum(bits[at : at + 11] in _FINDER_LIKE for at in range(size - 10))
    for y in range(size - 1):
        for x in range(size - 1):
            total += 3 * (matrix[y][x] == matrix[y][x + 1] == matrix[y + 1][x] == matrix[y + 1][x + 1])
    dark = sum(map(sum, matrix))
    return total + 10 * (abs(dark * 20 - size * size * 10) // (size * size))
