"""Handshake, addresses and time limits of the transport, without Paddle."""

import socket
import threading

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.cpu import handshake, transport
from ppfleetx.distributed.cpu.wire import DATA, Peer, StartError, make_header
from ppfleetx.distributed.rendezvous import Members


@pytest.fixture
def nobody() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_rank_that_cannot_be_reached_is_named(monkeypatch, nobody):
    names = [f"rank 0 at 127.0.0.1:{nobody}", "rank 1", "rank 2"]
    others = [("127.0.0.1", nobody), ("127.0.0.1", 0), ("127.0.0.1", 0)]
    monkeypatch.setattr(handshake, "meet", lambda *_: Members(1, names, others))
    with pytest.raises(StartError, match=rf"rank 1: no connection to rank 0 at 127.0.0.1:{nobody}"):
        handshake.connect_ranks(1, 3, "127.0.0.1")


def test_probes_are_ignored_and_a_rank_that_does_not_connect_is_named(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        members = Members(1, ["rank 0", "rank 1", "rank 2"], [listener.getsockname()[:2]] * 3)
        one, two = ((rank, handshake.MESSAGES) for rank in (1, 2))
        socket.create_connection(members.addresses[0]).close()
        handshake._connect_to(7, 0, members, handshake.MESSAGES).close()  # of another job
        with handshake._connect_to(1, 0, members, handshake.MESSAGES):
            found = handshake._accept(0, listener, {one}, members.names)
            assert found.keys() == {one}
            found[one].close()
        with (
            handshake._connect_to(1, 0, members, handshake.MESSAGES),
            pytest.raises(StartError, match=r"rank 0: rank 2 did not connect within 0\.5 s"),
        ):
            handshake._accept(0, listener, {one, two}, members.names)


def test_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "10.1.2.3:6170")
    assert handshake.local_address() == "10.1.2.3"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert handshake.local_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    with pytest.raises(ConfigError, match="nonesuch0"):
        handshake.local_address()


def test_time_limit(monkeypatch):
    monkeypatch.delenv(transport.TIMEOUT_VARIABLE, raising=False)
    assert transport.time_limit() == 1800
    monkeypatch.setenv(transport.TIMEOUT_VARIABLE, "0")
    assert transport.time_limit() == 0
    for wrong in ("-1", "soon", "inf", "nan"):
        monkeypatch.setenv(transport.TIMEOUT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=wrong):
            transport.time_limit()


def test_a_rank_ends_when_the_others_have_what_it_sent(monkeypatch):
    """Otherwise its kernel would answer late messages with a reset, and undelivered data would be lost."""
    monkeypatch.setattr(transport, "_GOODBYE_SECONDS", 20.0)
    payload = memoryview(bytearray(1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        theirs.settimeout(20.0)
        theirs.connect(server.getsockname())
        ours, _ = server.accept()
        with ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            mesh = transport.Connections(0, 0.0, {1: Peer(1, ours, "rank 1")})
            mesh.peers[1].send(make_header(DATA, length=payload.nbytes), payload)
            closing = threading.Thread(target=mesh.close, daemon=True)
            closing.start()
            closing.join(0.2)
            assert closing.is_alive(), "most of it is in this rank's kernel"
            while theirs.recv(1 << 20):
                pass
            closing.join(20.0)
            assert not closing.is_alive()
