"""Handshake, addresses and time limits of the transport, without Paddle."""

import socket
import threading

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.cpu import handshake as handshake
from ppfleetx.distributed.cpu import transport as transport
from ppfleetx.distributed.cpu.wire import DATA, CommError, Peer, StartError, make_header
from ppfleetx.distributed.rendezvous import Members
from tests.helpers.waiting import wait_for

TOKEN = bytes(range(32))


def shake_hands(monkeypatch, token_of_dialer: bytes, addressed: int = 0):
    """Run both ends of a handshake; return (dialer's result, welcomer's result)."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(handshake.socket, "create_connection", lambda *_: ours)
    results: dict[str, object] = {}

    def welcome() -> None:
        try:
            results["welcome"], _ = handshake._welcome(0, theirs, TOKEN)
        except (CommError, EOFError, OSError) as error:
            results["welcome"] = error
            theirs.close()

    thread = threading.Thread(target=welcome)
    thread.start()
    try:
        members = Members(1, ["rank"] * 3, [("host", 1)] * 3, token_of_dialer)
        results["dial"] = handshake._connect_to(1, addressed, members, handshake.MESSAGES)
    except CommError as error:
        results["dial"] = error
    thread.join(10)
    return results["dial"], results["welcome"]


def test_both_sides_know_each_other(monkeypatch):
    dialer, welcomer = shake_hands(monkeypatch, TOKEN)
    assert (dialer.rank, welcomer.rank) == (0, 1)


@pytest.mark.parametrize(("token", "addressed"), [(bytes(32), 0), (TOKEN, 2)])
def test_a_wrong_token_or_rank_is_refused(monkeypatch, token, addressed):
    dialer, welcomer = shake_hands(monkeypatch, token, addressed)
    assert isinstance(dialer, CommError)
    assert isinstance(welcomer, CommError)


def test_a_rank_that_gives_up_is_one_error(monkeypatch):
    """Rank 1 of three cannot reach rank 0, while it still listens for rank 2."""
    nobody = socket.create_server(("127.0.0.1", 0))
    port = nobody.getsockname()[1]
    nobody.close()
    names = [f"rank 0 at 127.0.0.1:{port}", "rank 1", "rank 2"]
    others = [("127.0.0.1", port), ("127.0.0.1", 0), ("127.0.0.1", 0)]
    monkeypatch.setattr(handshake, "meet", lambda *_: Members(1, names, others, TOKEN))
    threads: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", threads.append)
    with pytest.raises(StartError, match=rf"rank 1: no connection to rank 0 at 127.0.0.1:{port}"):
        handshake.connect_ranks(1, 3, "127.0.0.1")
    wait_for(lambda: not any(thread.name.endswith("(_accept)") for thread in threading.enumerate()), 5)
    assert threads == []


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
            mesh = transport.Mesh(0, 0.0, {1: Peer(1, ours)})
            mesh.peers[1].send(make_header(DATA, length=payload.nbytes), payload)
            closing = threading.Thread(target=mesh.close, daemon=True)
            closing.start()
            closing.join(0.2)
            assert closing.is_alive(), "most of it is in this rank's kernel"
            while theirs.recv(1 << 20):
                pass
            closing.join(20.0)
            assert not closing.is_alive()
