"""Peers as callers name them, and links as the library reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_datadist.checks import check_isinstance, check_uint16, check_uint32, check_uint64
from llm_datadist.enums import LLMRole
from llm_datadist.status import ParamInvalidError


class LLMClusterInfo:
    """A peer to link or unlink: its id and where it listens."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | None = None
        self._local_ip_info_list: list[tuple[str, int]] = []
        self._remote_ip_info_list: list[tuple[str, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """The peer's id, uint64; None until it is set."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value: int) -> None:
        self._remote_cluster_id = check_uint64("remote_cluster_id", value)

    @property
    def remote_role_type(self) -> LLMRole | None:
        """The peer's role; informative."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, value: LLMRole) -> None:
        self._remote_role_type = check_isinstance("remote_role_type", value, LLMRole)

    @property
    def local_ip_info_list(self) -> list[tuple[str, int]]:
        """The local (host, port) pairs."""
        return list(self._local_ip_info_list)

    @property
    def remote_ip_info_list(self) -> list[tuple[str, int]]:
        """The peer's (host, port) pairs."""
        return list(self._remote_ip_info_list)

    def append_local_ip_info(self, ip: str | int | tuple[str | int, int], port: int | None = None) -> None:
        """Adds an address of this side; its port may be 0 and is not bound.

        Args:
            ip: IPv4, IPv6 or host name as text, IPv4 as a little-endian int, or a tuple (ip, port).
            port: The port, uint16; left out with the tuple.

        Raises:
            TypeError: A wrong type.
            ValueError: A number outside its range.
            ParamInvalidError: An empty host.
        """
        self._local_ip_info_list.append(_address(ip, port))

    def append_remote_ip_info(self, ip: str | int | tuple[str | int, int], port: int | None = None) -> None:
        """Adds the address where the peer listens.

        Args:
            ip: IPv4, IPv6 or host name as text, IPv4 as a little-endian int, or a tuple (ip, port).
            port: The port, uint16; left out with the tuple.

        Raises:
            TypeError: A wrong type.
            ValueError: A number outside its range.
            ParamInvalidError: An empty host.
        """
        self._remote_ip_info_list.append(_address(ip, port))

    def __repr__(self) -> str:
        return (
            f"LLMClusterInfo(remote_cluster_id={self._remote_cluster_id}, local={self._local_ip_info_list}, "
            f"remote={self._remote_ip_info_list})"
        )


def _address(ip: Any, port: Any) -> tuple[str, int]:
    if isinstance(ip, tuple) and port is None:
        if len(ip) != 2:
            raise TypeError(f"ip as a tuple must be (ip, port), not {ip!r:.200}")
        ip, port = ip
    ip = check_isinstance("ip", ip, (str, int))
    number = check_uint16("port", port)
    if isinstance(ip, int):
        return ".".join(str(byte) for byte in check_uint32("ip", ip).to_bytes(4, "little")), number
    host = ip[1:-1] if ip.startswith("[") and ip.endswith("]") else ip
    if not host or host != host.strip():
        raise ParamInvalidError(f"ip is {ip!r}; it must be an IPv4 or IPv6 address or a host name")
    return host, number


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One link, as ``LLMDataDist.links()`` shows it.

    Attributes:
        cluster_id: The peer.
        address: The peer's end of the control connection, "host:port".
        transport: Name of the transport with which this side reads the peer.
        reasons: Why that transport, one line per candidate.
        state: "up" or "silent".
        since: When the link came up, seconds since the epoch.
        bytes_in: Bytes read from the peer by transfers that succeeded.
        bytes_out: Bytes that the peer said it has read of us: pulls in managed mode, and our pushes.
            A pull in accessible mode says nothing to its owner.
    """

    cluster_id: int
    address: str
    transport: str
    reasons: tuple[str, ...]
    state: str
    since: float
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class Notify:
    """A message of a peer.

    Attributes:
        cluster_id: Who sent it.
        name: Its name.
        message: Its bytes.
    """

    cluster_id: int
    name: str
    message: bytes
