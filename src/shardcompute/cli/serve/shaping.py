"""Transport of the hidden option --shape: this process sends as a machine of an emulated network would."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardcompute.wire import Transports


def open_transports(shape: str | None) -> Transports:
    """How to make links on that network; without the option, on this machine's own."""
    from shardcompute.wire import Transports, default_transports

    if shape is None:
        return default_transports()
    from shardcompute.sim.shape_file import ShapeReader, parse_shape_option
    from shardcompute.sim.shaped_links import ShapedTransport
    from shardcompute.wire import TcpTransport

    machine, path = parse_shape_option(shape)
    return Transports({"tcp": ShapedTransport(TcpTransport(), machine, ShapeReader(path))})
