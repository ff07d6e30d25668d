"""Frames on one connection: what overtakes what, and who never waits."""

import socket
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ppfleetx.distributed.cpu.wire import DATA, PART, PART_BYTES, QUERY, SHORT_BYTES, Peer, make_header

LONG = 64 * PART_BYTES
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
    payload = memoryview(bytearray(b"x" * LONG))
    thread = threading.Thread(target=peer.send, args=(make_header(DATA, length=LONG), payload), daemon=True)
    thread.start()
    return thread


def receive(peer: Peer) -> tuple[int, bytes]:
    """(kind, payload) of the next frame."""
    fields = peer.receive_header()
    is_long = fields[0] == DATA and fields[8] > SHORT_BYTES
    payload = bytearray(0 if is_long else fields[8])
    peer.receive(memoryview(payload))
    return fields[0], bytes(payload)


def test_a_short_frame_does_not_wait_for_the_end_of_a_long_one(ends: tuple[Peer, Peer]) -> None:
    sender, receiver = ends
    thread = send_long(sender)
    assert receive(receiver)[0] == DATA
    content = bytearray(b"short")
    sender.send(make_header(DATA, length=5), memoryview(content))
    content[:] = b"later"  # it may change at once
    frames = [receive(receiver) for _ in range(1 + LONG // PART_BYTES)]
    kinds = [kind for kind, _ in frames]
    assert kinds.index(DATA) < LONG // PART_BYTES // 2
    assert frames.pop(kinds.index(DATA)) == (DATA, b"short")
    assert b"".join(payload for _, payload in frames) == b"x" * LONG
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_reader_thread_does_not_wait_for_a_full_socket(ends: tuple[Peer, Peer]) -> None:
    sender, receiver = ends
    count = 0
    with pytest.raises(BlockingIOError):
        while True:
            sender.connection.send(make_header(QUERY), socket.MSG_DONTWAIT)
            count += 1
    frames = [make_header(QUERY, number=number) for number in range(100)]
    for frame in frames:
        sender.send_control(frame)
    assert [receiver.receive_header()[0] for _ in range(count)] == [QUERY] * count
    assert [receiver.receive_header()[6] for _ in frames] == list(range(100))


def test_the_last_frame_is_behind_all_others(ends: tuple[Peer, Peer]) -> None:
    sender, receiver = ends
    thread = send_long(sender)
    assert receive(receiver)[0] == DATA
    last = threading.Thread(target=sender.send_last, args=(make_header(QUERY), SECONDS), daemon=True)
    last.start()
    kinds = [receive(receiver)[0] for _ in range(1 + LONG // PART_BYTES)]
    assert kinds == [PART] * (LONG // PART_BYTES) + [QUERY]
    thread.join(SECONDS)
    last.join(SECONDS)


def test_the_last_frame_is_given_up_when_another_does_not_end(ends: tuple[Peer, Peer]) -> None:
    sender, receiver = ends
    thread = send_long(sender)
    assert receive(receiver)[0] == DATA
    with pytest.raises(TimeoutError, match="still sending"):
        sender.send_last(make_header(QUERY), 0.01)
    assert {receive(receiver)[0] for _ in range(LONG // PART_BYTES)} == {PART}
    thread.join(SECONDS)
    assert not thread.is_alive()


def tcp_ends(buffer_bytes: int) -> tuple[Peer, Peer]:
    """As :func:`ends`, but TCP, which takes a part of a frame where there is no room for the whole."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.socket()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        theirs.connect(server.getsockname())
        ours, _ = server.accept()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    theirs.settimeout(SECONDS)
    return Peer(1, ours), Peer(0, theirs)


def test_what_a_full_socket_has_taken_of_a_frame_is_not_sent_again() -> None:
    sender, receiver = tcp_ends(1 << 16)
    taken, send = [], sender.connection.send
    frames = [make_header(QUERY, number=i) + bytes([i]) * (1 << 18) for i in range(5)]
    with sender.connection, receiver.connection:
        sender.connection = SimpleNamespace(send=lambda *given: taken.append(send(*given)) or taken[-1])
        for frame in frames:
            sender.send_control(frame)
        for frame in frames:
            found = bytearray(len(frame))
            receiver.receive(memoryview(found))
            assert found == frame
    assert set(taken) - {len(frame) for frame in frames}, "every frame was taken whole"


def test_a_frame_that_comes_while_a_late_one_leaves_is_not_forgotten(ends: tuple[Peer, Peer]) -> None:
    """Between the last look of the thread that sends later and the end of its lock."""
    sender, receiver = ends

    class Lock:
        """Sends a frame from another thread before it is let go for the first time."""

        def __init__(self) -> None:
            self.inner, self.first = threading.Lock(), True

        def acquire(self, blocking: bool = True) -> bool:
            return self.inner.acquire(blocking)

        def release(self) -> None:
            if self.first:
                self.first = False
                other = threading.Thread(target=sender.send, args=(make_header(QUERY, number=7),))
                other.start()
                other.join(SECONDS)
            self.inner.release()

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    sender._sending = Lock()
    sender._flush_later()
    assert not sender._short
    assert receiver.receive_header()[6] == 7
