"""The listening sockets: one for each worker, held open by the supervisor so that a restart loses no connection."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048


class ListenFault(Exception):
    """Why the address cannot be had, in one line."""


def open_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets that share one address by SO_REUSEPORT: the kernel spreads new connections over them.

    Port 0 takes a free one, the same for all.

    Raises:
        ListenFault: the address is in use, not ours, not allowed or not known.
    """
    family, address = _resolve(host, port)
    listeners: list[socket.socket] = []
    try:
        if port:
            _claim(family, address)
        for _ in range(count):
            listeners.append(_listen(family, address))
            address = listeners[0].getsockname()
    except OSError as exc:
        for listener in listeners:
            listener.close()
        raise ListenFault(_explain(exc, host, port)) from exc
    return listeners


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise ListenFault(f'server.host: "{host}" is not an address of this machine') from exc
    found.sort(
        key=lambda entry: entry[0] != socket.AF_INET
    )  # "localhost": IPv4, which all clients try
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)


def _claim(family: socket.AddressFamily, address: tuple[str, int]) -> None:
    """Bind once without SO_REUSEPORT: with it, we would share the port with a program that set it too.

    SO_REUSEADDR only lets us pass connections of the last run that are still closing.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _listen(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _explain(exc: OSError, host: str, port: int) -> str:
    choose = "choose another: --port or server.port"
    reasons = {
        errno.EADDRINUSE: f"address already in use (by another program); {choose}",
        errno.EACCES: f"permission denied: ports below 1024 are for root; {choose}",
        errno.EADDRNOTAVAIL: "not an address of this machine; change --host or server.host",
    }
    return f"{join_host(host, port)}: {reasons.get(exc.errno or 0, exc.strerror or str(exc))}"


def join_host(host: str, port: int) -> str:
    """`host:port` as URLs want it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
