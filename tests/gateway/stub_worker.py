"""A gateway worker in small, for tests of the supervisor: reads its order, serves on the inherited socket.

GET /readyz, /pid, /text (the newest config), /slow (half a second). Arguments change how it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import msgspec

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
busy: set[threading.Thread] = set()
newest = {}


def read_order() -> dict | None:
    head = os.read(0, 4)
    size = int.from_bytes(head, "big")
    body = b""
    while head and len(body) < size:
        body += os.read(0, size - len(body))
    return msgspec.msgpack.decode(body) if head else None


def follow() -> None:
    while (order := read_order()) is not None:
        newest.update(order)
    os._exit(0)


def answer(connection: socket.socket) -> None:
    with connection:
        path = connection.recv(4096).split()[1]
        if path == b"/slow":
            time.sleep(0.5)
        body = newest["config"]["text"] if path == b"/text" else str(os.getpid())
        text = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
        connection.sendall(text.encode())


def terminate(signum: int, frame: object) -> None:
    if MODE == "stubborn":
        return
    for thread in list(busy):
        thread.join()
    os._exit(0)


if MODE.startswith("exit-"):
    sys.stderr.write("broken for a reason\n")
    os._exit(int(MODE.removeprefix("exit-")))
newest.update(read_order() or {})
signal.signal(signal.SIGTERM, terminate)
threading.Thread(target=follow, daemon=True).start()
listener = socket.socket(fileno=newest["listen_fd"])
while True:
    accepted, _ = listener.accept()
    thread = threading.Thread(target=answer, args=(accepted,), daemon=True)
    busy.add(thread)
    thread.start()
