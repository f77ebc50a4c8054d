"""Receives packets with descriptors, which child processes do not inherit."""

from __future__ import annotations

import array
import socket

_FD_BYTES = array.array("i").itemsize
# A plain number: computing with the enumeration makes an object each time.
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)


def receive(sock: socket.socket, bytes_max: int, fds_max: int) -> tuple[bytes, list[int], int]:
    """Returns one packet's data, its descriptors, which the caller owns, and flags.
    ``socket.recv_fds`` cannot set MSG_CMSG_CLOEXEC."""
    data, ancillary, flags, _ = sock.recvmsg(bytes_max, socket.CMSG_LEN(fds_max * _FD_BYTES), _CLOSE_ON_EXEC)
    if not ancillary:
        return data, [], flags
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), flags
