"""Addresses of peers in every form that callers use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist.clusters import LinkInfo, LLMClusterInfo, Notify
from llm_datadist.enums import LLMRole
from llm_datadist.status import ParamInvalidError


@pytest.mark.rule("4.1")
def test_id_and_role() -> None:
    info = LLMClusterInfo()
    assert (info.remote_cluster_id, info.remote_role_type) == (None, None)
    info.remote_cluster_id = np.uint64(2**64 - 1)  # type: ignore[assignment]
    info.remote_role_type = LLMRole.DECODER
    assert (info.remote_cluster_id, info.remote_role_type) == (2**64 - 1, LLMRole.DECODER)
    with pytest.raises(ValueError, match="remote_cluster_id is -1"):
        info.remote_cluster_id = -1
    with pytest.raises(TypeError, match="remote_cluster_id must be an int, not str"):
        info.remote_cluster_id = "1"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="remote_role_type must be LLMRole, not int"):
        info.remote_role_type = 1  # type: ignore[assignment]


@pytest.mark.rule("4.2", "4.3")
@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (("127.0.0.1", 26000), ("127.0.0.1", 26000)),
        ((0x0100007F, 26000), ("127.0.0.1", 26000)),
        ((np.uint32(0x0100007F), np.uint16(1)), ("127.0.0.1", 1)),
        ((0, 0), ("0.0.0.0", 0)),
        (("::1", 65535), ("::1", 65535)),
        (("[::1]", 5), ("::1", 5)),
        (("localhost", 5), ("localhost", 5)),
        ((("10.0.0.1", 7),), ("10.0.0.1", 7)),
        (((0x0100007F, 7),), ("127.0.0.1", 7)),
    ],
)
def test_n1_forms_of_an_address(arguments: tuple[Any, ...], address: tuple[str, int]) -> None:
    info = LLMClusterInfo()
    info.append_local_ip_info(*arguments)
    info.append_remote_ip_info(*arguments)
    info.append_remote_ip_info("other", 1)
    assert info.local_ip_info_list == [address]
    assert info.remote_ip_info_list == [address, ("other", 1)]


@pytest.mark.rule("4.4")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("127.0.0.1", 65536), ValueError, "port is 65536"),
        (("127.0.0.1", -1), ValueError, "port is -1"),
        (("127.0.0.1", "1"), TypeError, "port must be an int, not str"),
        (("127.0.0.1", 3.14), TypeError, "port must be an int, not float"),
        (("127.0.0.1",), TypeError, "port must be an int, not NoneType"),
        ((2**32, 1), ValueError, "ip is 4294967296"),
        ((-1, 1), ValueError, "ip is -1"),
        ((True, 1), TypeError, "ip must be str or int, not bool"),
        ((None, 1), TypeError, "ip must be str or int, not NoneType"),
        ((("a", 1, 2),), TypeError, r"ip as a tuple must be \(ip, port\)"),
        ((("a", 1), 2), TypeError, "ip must be str or int, not tuple"),
        (("", 1), ParamInvalidError, "ip is ''"),
        ((" a", 1), ParamInvalidError, "ip is ' a'"),
    ],
)
@pytest.mark.parametrize("method", ["append_local_ip_info", "append_remote_ip_info"])
def test_addresses_refused(
    method: str, arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    info = LLMClusterInfo()
    with pytest.raises(error, match=text) as caught:
        getattr(info, method)(*arguments)
    assert type(caught.value) is error
    assert info.local_ip_info_list == info.remote_ip_info_list == []


def test_reports_are_frozen_values() -> None:
    link = LinkInfo(1, "a:2", "tcp", ("why",), "up", 1.0, 3, 4)
    assert link == LinkInfo(1, "a:2", "tcp", ("why",), "up", 1.0, 3, 4)
    with pytest.raises(AttributeError):
        link.state = "down"  # type: ignore[misc]
    assert Notify(1, "n", b"m") == Notify(1, "n", b"m")
