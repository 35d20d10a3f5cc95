"""The rules that option texts obey, and how property values become those texts. Pure functions.

``text_of_*`` raise TypeError or ValueError for a value that no text could stand for; ``read_*`` raise
``BrokenRuleError``, whose text completes the sentence "it must be ...".
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from typing import Any

from llm_datadist.checks import as_int, check_isinstance, check_range

BACKENDS = ("auto", "local", "shm", "tcp", "nixl", "hixl")

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_WILDCARDS = ("0.0.0.0", "::", "0:0:0:0:0:0:0:0")
_RETRY = re.compile(r"retries=([0-9]{1,9}),backoff_ms=([0-9]{1,9})")
_SHARE = re.compile(r"([0-9]{1,20}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][-+]?[0-9]{1,3})?")
_MAX_DIGITS = 20  # more cannot be in any range here, and int() of very long texts is slow


class BrokenRuleError(ValueError):
    """A text that breaks a rule; says what it must be."""


# ---- property value -> text -----------------------------------------------------------------------


def text_of_str(name: str, value: Any) -> str:
    """A str as it is."""
    text: str = check_isinstance(name, value, str)
    return text


def text_of_secret(name: str, value: Any) -> str:
    """A str as it is; a wrong type is not shown, it may hold the secret."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be str, not {type(value).__name__}")
    return value


def text_of_flag(name: str, value: Any) -> str:
    """True and False as "1" and "0"."""
    return "1" if check_isinstance(name, value, bool) else "0"


def text_of_int(name: str, value: Any) -> str:
    """An int in digits."""
    return str(as_int(name, value))


def text_of_number(name: str, value: Any) -> str:
    """An int in digits, or a str as it is."""
    return value if isinstance(value, str) else str(check_isinstance(name, value, (int, str)))


def text_of_devices(name: str, value: Any) -> str:
    """One device id, or a list of them joined by ";"."""
    if not isinstance(value, (list, tuple)):
        return str(check_range(name, check_isinstance(name, value, (int, list, tuple)), 0, 2**31 - 1))
    if not value:
        raise ValueError(f"{name} is {value!r}; name at least one device id")
    return ";".join(str(check_range(f"{name}[{i}]", entry, 0, 2**31 - 1)) for i, entry in enumerate(value))


def text_of_share(name: str, value: Any) -> str:
    """A float or an int."""
    return str(check_isinstance(name, value, (float, int)))


# ---- text -> meaning ------------------------------------------------------------------------------


def read_any(text: str) -> str:
    """Any text."""
    return text


def read_filled(text: str) -> str:
    """Any text that is not empty."""
    if not text:
        raise BrokenRuleError("a text that is not empty")
    return text


def read_flag(text: str) -> bool:
    """Whether it is "1"; only "0" is the other choice."""
    if text not in ("0", "1"):
        raise BrokenRuleError("'0' or '1'")
    return text == "1"


def number_reader(low: int, high: int) -> Callable[[str], int]:
    """A reader of digits within [low, high]."""

    def read(text: str) -> int:
        number = _digits(text)
        if number is None or not low <= number <= high:
            raise BrokenRuleError(f"a whole number from {low} to {high}, in digits")
        return number

    return read


def _digits(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        return None
    return int(text)


def read_devices(text: str) -> int:
    """The one device id."""
    ids = [_digits(part) for part in text.split(";")]
    if None in ids:
        raise BrokenRuleError("a device id, a whole number in digits")
    if len(ids) != 1:
        raise BrokenRuleError("one device id: an engine works with one device")
    return int(text)


def read_json(text: str) -> Any:
    """Any JSON value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise BrokenRuleError("JSON") from exc


def json_reader(may_be_empty: bool) -> Callable[[str], dict[str, Any]]:
    """A reader of a JSON object."""

    def read(text: str) -> dict[str, Any]:
        if not text and may_be_empty:
            return {}
        try:
            found = read_json(text)
        except BrokenRuleError as exc:
            raise BrokenRuleError(wanted) from exc
        if not isinstance(found, dict):
            raise BrokenRuleError(wanted)
        return found

    wanted = "'' or a JSON object" if may_be_empty else "a JSON object"
    return read


def read_backend(text: str) -> str:
    """The transport that is forced, or "auto"."""
    if text not in BACKENDS:
        raise BrokenRuleError("one of " + ", ".join(BACKENDS))
    return "auto" if text == "hixl" else text


def read_advertised(text: str) -> str:
    """A host that peers can dial."""
    if not _is_host(text) or text.partition("%")[0] in _WILDCARDS:
        raise BrokenRuleError("an IPv4 or IPv6 address or a host name that peers can dial, not a wildcard")
    return text


def _is_host(text: str) -> bool:
    if ":" in text:
        address, percent, scope = text.partition("%")
        if percent and not _SCOPE.fullmatch(scope):
            return False
        return _is_ip(ipaddress.IPv6Address, address)
    if text.replace(".", "").isdigit():
        return _is_ip(ipaddress.IPv4Address, text)
    return bool(_HOST.fullmatch(text))


def _is_ip(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def read_listen(text: str) -> tuple[str, int]:
    """Host (IPv6 without brackets, "0.0.0.0" when empty) and port of "ip:port"."""
    host, colon, port = text.rpartition(":")
    number = _digits(port)
    if not colon or number is None or number > 0xFFFF:
        raise BrokenRuleError("'ip:port', '[IPv6]:port' or 'name:port' with a port from 0 to 65535")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    elif ":" in host:
        raise BrokenRuleError("'ip:port'; an IPv6 address stands in brackets, as in '[::1]:26000'")
    host = host or "0.0.0.0"
    if not _is_host(host):
        raise BrokenRuleError("'ip:port', '[IPv6]:port' or 'name:port' with a valid address or name")
    return host, number


def read_metrics(text: str) -> tuple[str, int]:
    """Where metrics are served: a port on loopback, or "ip:port"."""
    number = _digits(text)
    if number is not None and number <= 0xFFFF:
        return "127.0.0.1", number
    try:
        return read_listen(text)
    except BrokenRuleError as exc:
        raise BrokenRuleError("a port from 0 to 65535, or 'ip:port'") from exc


def read_share(text: str) -> float:
    """A number from 0 to 1."""
    if not _SHARE.fullmatch(text) or not 0 <= float(text) <= 1:
        raise BrokenRuleError("a number from 0 to 1")
    return float(text)


def read_verify(text: str) -> str:
    """How transfers are verified."""
    if text not in ("off", "xxh3"):
        raise BrokenRuleError("'off' or 'xxh3'")
    return text


def read_retry(text: str) -> tuple[int, int] | None:
    """Retries and back-off in ms; None for "off"."""
    if text == "off":
        return None
    match = _RETRY.fullmatch(text)
    if match is None:
        raise BrokenRuleError("'off' or 'retries=N,backoff_ms=M'")
    return int(match[1]), int(match[2])
