from __future__ import annotations

import socket

import pytest

from gateway.listeners import ListenFault, join_host, open_listeners


def close(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def test_all_listeners_share_one_free_port() -> None:
    listeners = open_listeners("127.0.0.1", 0, 3)
    assert len({listener.getsockname() for listener in listeners}) == 1
    with socket.create_connection(listeners[0].getsockname()):
        pass
    close(listeners)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "SO_REUSEPORT"])
def test_a_port_of_another_program_is_refused_in_words(shared: bool) -> None:
    with socket.socket() as other:
        if shared:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ListenFault) as caught:
            open_listeners("127.0.0.1", port, 1)
    assert str(caught.value) == (
        f"127.0.0.1:{port}: address already in use (by another program);"
        " choose another: --port or server.port"
    )


def test_connections_that_are_still_closing_do_not_block_the_port() -> None:
    first = open_listeners("127.0.0.1", 0, 1)
    host, port = first[0].getsockname()
    client = socket.create_connection((host, port))
    accepted, _ = first[0].accept()
    close(first)
    accepted.close()  # the side that closes first keeps the port in TIME_WAIT
    client.close()
    close(open_listeners(host, port, 1))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 300])
def test_a_host_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(ListenFault, match="not an address of this machine"):
        open_listeners(host, 0, 1)


def test_localhost_means_ipv4() -> None:
    listeners = open_listeners("localhost", 0, 1)
    assert listeners[0].getsockname()[0] == "127.0.0.1"
    close(listeners)


def test_an_ipv6_host_is_written_in_brackets() -> None:
    assert (join_host("::1", 80), join_host("127.0.0.1", 80)) == ("[::1]:80", "127.0.0.1:80")
