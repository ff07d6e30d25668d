"""Frames on one connection keep their order, and the reader thread never blocks."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from ppfleetx.distributed.cpu.wire import DATA, HEADER, QUERY, Peer, make_header

LONG = 16 << 20
SECONDS = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Peer, Peer]]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(SECONDS), 0))
    yield Peer(1, ours), Peer(0, theirs)
    ours.close()
    theirs.close()


def send_long(peer: Peer) -> threading.Thread:
    """Begin to send more than a socket holds."""
    frame = make_header(DATA, length=LONG), memoryview(bytearray(b"x" * LONG))
    thread = threading.Thread(target=peer.send, args=frame, daemon=True)
    thread.start()
    return thread


def receive(peer: Peer) -> tuple[int, int, bytes]:
    """(kind, number, payload) of the next frame."""
    fields = peer.receive_header()
    payload = bytearray(fields[8])
    peer.receive(memoryview(payload))
    return fields[0], fields[6], bytes(payload)


def test_a_reply_waits_for_nobody_and_follows_the_frame_that_is_being_sent(ends: tuple[Peer, Peer]) -> None:
    sender, receiver = ends
    thread = send_long(sender)
    assert receiver.receive_header()[0] == DATA
    for number in range(3):
        sender.reply(make_header(QUERY, number=number))
    payload = bytearray(LONG)
    receiver.receive(memoryview(payload))
    assert payload == b"x" * LONG
    assert [receive(receiver)[:2] for _ in range(3)] == [(QUERY, number) for number in range(3)]
    thread.join(SECONDS)


def test_a_frame_is_given_up_when_another_thread_does_not_finish(ends: tuple[Peer, Peer]) -> None:
    sender, receiver = ends
    thread = send_long(sender)
    receiver.receive(memoryview(bytearray(HEADER.size)))
    with pytest.raises(TimeoutError, match="still sending"):
        sender.send(make_header(QUERY), patience=0.01)
    receiver.receive(memoryview(bytearray(LONG)))
    thread.join(SECONDS)
    assert not thread.is_alive()
