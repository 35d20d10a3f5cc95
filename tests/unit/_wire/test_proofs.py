"""What a proof depends on: the challenge, and both ends of the connection as each side sees them."""

from __future__ import annotations

import itertools
import socket

import pytest

from llm_datadist._wire.proofs import PROOF_NBYTES, Ends, end_of, proof_of, secret_of

HERE, THERE, ELSEWHERE = (end_of((host, 4000)) for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"))


def test_g16_both_sides_of_one_connection_come_to_the_same() -> None:
    shows, checks = Ends(HERE, THERE), Ends(THERE, HERE)
    assert proof_of(b"c" * 16, shows) == proof_of(b"c" * 16, checks.mirrored())
    assert len(proof_of(b"c" * 16, shows)) == PROOF_NBYTES


def test_g16_another_challenge_another_end_or_the_other_side_is_another_proof() -> None:
    ends = [Ends(*pair) for pair in itertools.permutations((HERE, THERE, ELSEWHERE), 2)]
    found = [proof_of(challenge, e) for challenge in (b"c" * 16, b"d" * 16, b"c" * 17) for e in ends]
    assert len(set(found)) == len(found) == 18


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("127.0.0.1", 5), ("::ffff:127.0.0.1", 5, 0, 0), True),
        (("127.0.0.1", 5), ("127.0.0.1", 6), False),
        (("::1", 5, 0, 0), ("0:0:0:0:0:0:0:1", 5, 7, 0), True),
        (("fe80::1%eth0", 5, 0, 2), ("fe80::1", 5, 0, 2), True),
        (("fe80::1", 5, 0, 2), ("fe80::1", 5, 0, 3), False),
        (("::1", 5, 0, 0), ("127.0.0.1", 5), False),
    ],
    ids=str,
)
def test_g16_an_end_has_one_form(one: tuple[object, ...], other: tuple[object, ...], same: bool) -> None:
    assert (end_of(one) == end_of(other)) is same


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["v4", "v4 in v6"])
def test_g16_two_sockets_see_one_connection(family: socket.AddressFamily) -> None:
    any_host = "127.0.0.1" if family == socket.AF_INET else "::"
    dual = family == socket.AF_INET6
    with socket.create_server((any_host, 0), family=family, dualstack_ipv6=dual) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as dialler, listener.accept()[0] as dialled:
            ours, theirs = (
                Ends(end_of(s.getsockname()), end_of(s.getpeername())) for s in (dialler, dialled)
            )
    assert ours == theirs.mirrored() != theirs


@pytest.mark.parametrize(
    ("mine", "peers", "within"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("127.0.0.1", "127.0.0.5", True),
        ("::1", "::1", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.12", "10.0.0.1", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("fd00::1", "fd00::2", False),
    ],
)
def test_g16_a_connection_within_this_host(mine: str, peers: str, within: bool) -> None:
    ends = Ends(end_of((mine, 4000, 0, 0)), end_of((peers, 5000, 0, 0)))
    assert ends.is_within_host is ends.mirrored().is_within_host is within


def test_g16_neither_side_alone_chooses_the_secret_of_a_link() -> None:
    assert secret_of(b"s" * 16, b"a" * 16, b"b" * 16) != secret_of(b"s" * 16, b"x" * 16, b"b" * 16)
    assert secret_of(b"s" * 16, b"a" * 16, b"b" * 16) != secret_of(b"s" * 16, b"b" * 16, b"a" * 16)
    assert secret_of(b"s" * 16, b"a" * 16, b"b" * 16) != secret_of(b"s" * 15, b"sa" * 8, b"b" * 16)
