"""Rank tables of the two-sided ``link``: who takes part, where each listens, who dials whom. Pure.

Every entry must be well formed; addresses and ports are judged only for the ranks that take part. Device ids
decide nothing but the default port.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from llm_datadist.status import ParamInvalidError

MIN_CLUSTERS, MAX_CLUSTERS = 2, 4
MAX_NAME_CHARS = 127
DEFAULT_BASE_PORT = 60000
BASE_PORT_VARIABLE = "HCCL_IF_BASE_PORT"
LOOPBACK = "127.0.0.1"
_UINT16_MAX = (1 << 16) - 1
_MAX_TEXT_CHARS = 4 << 20  # a table of thousands of ranks has well under a megabyte; read in some 50 ms
_MAX_DIGITS = 10
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank.

    Attributes:
        rank: Its number.
        hosts: Its addresses, the first to try first; IPv6 without brackets.
        port: Where it listens, on each of them.
        path: Its JSON path, for texts.
        falls_back: The last of several hosts is not from the table: it is the loopback of a single server.
    """

    rank: int
    hosts: tuple[str, ...]
    port: int
    path: str
    falls_back: bool = False


@dataclass(frozen=True, slots=True)
class Comm:
    """What one ``link`` is to do.

    Attributes:
        mine: Our own rank.
        dialled: Cluster id -> rank entry of those that we dial: lower ranks.
        awaited: Cluster id -> rank entry of those that dial us: higher ranks.
    """

    mine: RankEntry
    dialled: Mapping[int, RankEntry]
    awaited: Mapping[int, RankEntry]


def read_comm(
    cluster_id: int, comm_name: str, ranks: Mapping[int, int], rank_table: str, base_port: str | None
) -> Comm:
    """Checks the arguments of ``link`` against each other.

    Args:
        cluster_id: Ours.
        comm_name: 1 to 127 characters.
        ranks: Cluster id -> rank, of all that take part, by ascending rank.
        rank_table: JSON text.
        base_port: Text of ``HCCL_IF_BASE_PORT``, the port of device 0 for entries without ``listen_port``.

    Raises:
        ParamInvalidError: Naming the argument or the JSON path.
    """
    if not 1 <= len(comm_name) <= MAX_NAME_CHARS:
        raise ParamInvalidError(
            f"comm_name has {len(comm_name)} characters; it must have 1 to {MAX_NAME_CHARS}"
        )
    _check_ranks(cluster_id, ranks)
    entries = read_rank_table(rank_table, base_port, list(ranks.values()))
    mine = ranks[cluster_id]
    return Comm(
        mine=entries[mine],
        dialled={c: entries[r] for c, r in ranks.items() if r < mine},
        awaited={c: entries[r] for c, r in ranks.items() if r > mine},
    )


def _check_ranks(cluster_id: int, ranks: Mapping[int, int]) -> None:
    if not MIN_CLUSTERS <= len(ranks) <= MAX_CLUSTERS:
        raise ParamInvalidError(
            f"cluster_rank_info has {len(ranks)} clusters; a link takes {MIN_CLUSTERS} to {MAX_CLUSTERS}"
        )
    values = list(ranks.values())
    if any(a >= b for a, b in pairwise(values)):
        raise ParamInvalidError(
            f"cluster_rank_info has the ranks {values}; they must be ascending, each once"
        )
    if cluster_id not in ranks:
        raise ParamInvalidError(f"cluster_rank_info {dict(ranks)} lacks this cluster, {cluster_id}; add it")


def read_rank_table(text: str, base_port: str | None, wanted: Sequence[int]) -> dict[int, RankEntry]:
    """The wanted ranks of a table.

    Raises:
        ParamInvalidError: Not JSON, something needed is missing, a rank is not there or twice, or two ranks
            listen on one address and port.
    """
    table = _parsed(text)
    servers = _list(table, "server_list", "")
    places: dict[int, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for s, value in enumerate(servers):
        server_path = f"server_list[{s}]"
        server = _object(value, server_path)
        for d, entry in enumerate(_list(server, "device", f"{server_path}.")):
            path = f"{server_path}.device[{d}]"
            device = _object(entry, path)
            rank = _number(device, "rank_id", path)
            _number(device, "device_id", path)
            if rank in places:
                raise ParamInvalidError(f"{path}.rank_id is {rank}, as is that of {places[rank][0]}")
            places[rank] = path, server, device
    found = {
        rank: _entry(rank, *_place(places, rank), only_server=len(servers) == 1, base_port=base_port)
        for rank in wanted
    }
    _check_distinct(list(found.values()))
    return found


def _parsed(text: str) -> dict[str, Any]:
    if len(text) > _MAX_TEXT_CHARS:
        raise ParamInvalidError(
            f"rank_table has {len(text)} characters; more than {_MAX_TEXT_CHARS} make no sense"
        )
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ParamInvalidError(
            f"rank_table is not JSON: {exc}; it must be an object with server_list[].device[].rank_id"
        ) from exc
    return _object(table, "rank_table")


def _place(places: Mapping[int, tuple[str, Any, Any]], rank: int) -> tuple[str, Any, Any]:
    if rank not in places:
        raise ParamInvalidError(
            f"no server_list[].device[].rank_id is {rank}, which cluster_rank_info names; "
            f"the table has the ranks {_shown(sorted(places))}"
        )
    return places[rank]


def _entry(
    rank: int,
    path: str,
    server: dict[str, Any],
    device: dict[str, Any],
    *,
    only_server: bool,
    base_port: str | None,
) -> RankEntry:
    server_path = path[: path.index(".")]
    hosts = [_address(device, "device_ip", path), _address(server, "host_ip", server_path)]
    hosts.append(_ip(server.get("server_id")))
    given = tuple(dict.fromkeys(host for host in hosts if host))
    falls_back = only_server and bool(given) and LOOPBACK not in given
    if falls_back or (only_server and not given):
        given += (LOOPBACK,)
    if not given:
        raise ParamInvalidError(
            f"{path}.device_ip is missing, and rank {rank} has no other address: give it, or "
            f"{server_path}.host_ip, or a {server_path}.server_id that is an IP address"
        )
    return RankEntry(rank, given, _port(device, path, base_port), path, falls_back)


def _port(device: dict[str, Any], path: str, base_port: str | None) -> int:
    if "listen_port" in device:
        port = _number(device, "listen_port", path)
        if not 0 < port <= _UINT16_MAX:
            raise ParamInvalidError(f"{path}.listen_port is {port}; it must lie in 1..{_UINT16_MAX}")
        return port
    base = _base_port(base_port)
    device_id = _number(device, "device_id", path)
    if not 0 < base + device_id <= _UINT16_MAX:
        raise ParamInvalidError(
            f"{path}.device_id is {device_id}: with the base port {base} ({BASE_PORT_VARIABLE}) that is port "
            f"{base + device_id}, which must lie in 1..{_UINT16_MAX}; give {path}.listen_port"
        )
    return base + device_id


def _base_port(text: str | None) -> int:
    if text is None or text == "":
        return DEFAULT_BASE_PORT
    number = _digits(text)
    if number is None or number > _UINT16_MAX:
        raise ParamInvalidError(
            f"the environment variable {BASE_PORT_VARIABLE} was {_shown(text)} at init; it must be a port in digits"
        )
    return number


def _address(fields: dict[str, Any], name: str, path: str) -> str | None:
    value = fields.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, str) and _is_unspecified(value):
        return None  # some tools write 0.0.0.0 where a device has no address of its own
    host = _ip(value)
    if host is None:
        raise ParamInvalidError(f"{path}.{name} is {_shown(value)}; it must be an IP address")
    return host


def _ip(value: Any) -> str | None:
    """The address in its one usual form; None for what is none, or is none that can be dialled."""
    if not isinstance(value, str) or _is_unspecified(value):
        return None
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        return None


def _is_unspecified(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def _number(fields: dict[str, Any], name: str, path: str) -> int:
    if name not in fields:
        raise ParamInvalidError(f"{path}.{name} is missing; it must be a number, as int or str")
    value = fields[name]
    number = _digits(value) if isinstance(value, str) else value
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 10**_MAX_DIGITS:
        return number
    raise ParamInvalidError(f"{path}.{name} is {_shown(value)}; it must be a number >= 0, as int or str")


def _digits(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def _list(fields: dict[str, Any], name: str, path: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        shown = "missing" if value is None else _shown(value)
        raise ParamInvalidError(f"{path}{name} is {shown}; it must be a list with entries")
    return value


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ParamInvalidError(f"{path} is {_shown(value)}; it must be a JSON object")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _check_distinct(entries: Sequence[RankEntry]) -> None:
    """Two ranks on one address and port cannot both listen.

    The loopback that ranks with addresses of their own fall back to does not count.
    """
    taken: dict[tuple[str, int], RankEntry] = {}
    for entry in entries:
        for host in entry.hosts[:-1] if entry.falls_back else entry.hosts:
            other = taken.setdefault((host, entry.port), entry)
            if other is not entry:
                raise ParamInvalidError(
                    f"{other.path} and {entry.path} (ranks {other.rank} and {entry.rank}) both have the address "
                    f"{host} and port {entry.port}; give each its own listen_port or device_id"
                )
