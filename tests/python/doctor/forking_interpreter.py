"""An interpreter for a fleet file whose doctor runs in a fork of a process that has imported
PyTorch, which else takes seconds each time. Anything else is run by Python itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import command  # noqa: F401  (runs the doctor once)
import forked
from bulkhead.doctor.__main__ import main

_PROGRAM = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1:] and sys.argv[1].endswith("doctor/start.py"):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect({address!r})
        asked = {{"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}}
        socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
        sys.exit(int(server.recv(16)))
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def start(folder: Path) -> tuple[Path, BaseProcess]:
    """The interpreter, and the process that it asks."""
    address, program = str(folder / "forks.sock"), folder / "python"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen()
    program.write_text(_PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(listening,), daemon=True)
    process.start()
    listening.close()
    return program, process


def _serve(listening: socket.socket) -> None:
    while True:
        asking, _ = listening.accept()
        with asking:
            said, files, *_ = socket.recv_fds(asking, 1 << 20, 3)
            asked = json.loads(said)
            child = os.fork()
            if child == 0:
                os.environ.clear()
                os.environ.update(asked["environment"])
                forked.become(lambda: main(asked["arguments"]), Path(asked["folder"]), *files[1:])
            for file in files:
                os.close(file)
            asking.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
