"""Option texts: one rule per key, whether a property or a raw text brings the value."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist._core.options import RULE_OF_KEY, RULES, Options, parse_options
from llm_datadist.config import LLMConfig
from llm_datadist.status import FeatureNotEnabledError, LLMStatusCode, ParamInvalidError

ON = {"llm.EnableCacheManager": "1"}


def parsed(**others: str) -> Options:
    return parse_options({**ON, **{"llm." + key: text for key, text in others.items()}})


@pytest.mark.rule("3.25", "3.28", "3.34", "3.40", "3.49", "3.61", "3.62", "3.66", "3.67")
def test_defaults() -> None:
    assert parsed() == Options(
        sync_kv_timeout_ms=1000,
        listen=None,
        accessible=False,
        backend="auto",
        link_total_time_s=120,
        link_retry_count=1,
        heartbeat_interval_ms=1000,
        link_timeout_ms=30000,
        allow_multiple_instances=False,
        allow_ptrace=False,
        transfer_threads=0,
        tcp_connections=0,
        needs_local_ip=True,
        unknown=(),
    )


@pytest.mark.rule("3.49", "3.59", "3.61", "3.62", "3.65")
def test_values_arrive() -> None:
    options = parsed(
        SyncKvCacheWaitTime="250",
        listenIpInfo="127.0.0.1:26000",
        EnableRemoteCacheAccessible="1",
        TransferBackend="tcp",
        LinkTotalTime="7",
        LinkRetryCount="100",
        HeartbeatIntervalMs="50",
        LinkTimeoutMs="400",
        AllowMultipleInstances="1",
        AllowPtrace="1",
        TransferThreads="3",
        TcpConnections="4",
    )
    assert options == Options(
        250, ("127.0.0.1", 26000), True, "tcp", 7, 100, 50, 400, True, True, 3, 4, needs_local_ip=True
    )


@pytest.mark.rule("3.29")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[::]:26000", ("::", 26000)),
        (":26000", ("0.0.0.0", 26000)),
        ("localhost:1", ("localhost", 1)),
        ("node-3.rack_1.example.:1", ("node-3.rack_1.example.", 1)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_n1_listen_addresses(text: str, address: tuple[str, int]) -> None:
    assert parsed(listenIpInfo=text).listen == address


BAD_LISTEN = [
    "127.0.0.1:-1",
    "127.0.0.1:65536",
    "127.0.0.1:3.14",
    "127.0.0.1:",
    "127.0.0.1",
    "26000",
    "-1",
    "",
    ":",
    "a:b:c",
    "::1:26000",
    "[::1]",
    "[::1:26000",
    "[]:1",
    "[127.0.0.1]:1",
    "[::1%]:1",
    "999.0.0.1:1",
    "a b:1",
    "-x:1",
    "a/b:1",
    "127.0.0.1:\u0661",
    "127.0.0.1: 1",
    "127.0.0.1:1\n",
    "127.0.0.1:" + "0" * 30,
]

BAD = [
    *(("llm.listenIpInfo", text) for text in BAD_LISTEN),
    *(
        ("llm.SyncKvCacheWaitTime", text)
        for text in ("0", "-5", "abc", "1.5", "True", "", " 1", str(2**31), "9" * 6000)
    ),
    *(("llm.LinkRetryCount", text) for text in ("0", "-1", "101", "x")),
    *(("llm.LinkTotalTime", text) for text in ("-1", str(2**32))),
    *(("llm.RdmaTrafficClass", text) for text in ("-1", str(2**32))),
    ("llm.RdmaServiceLevel", "low"),
    *(("llm.EnableCacheManager", text) for text in ("true", "", "2", "1 ")),
    ("llm.EnableRemoteCacheAccessible", "yes"),
    ("llm.AllowMultipleInstances", "True"),
    ("llm.AllowPtrace", "on"),
    ("llm.EnableSwitchRole", "no"),
    *(("llm.LocalCommRes", text) for text in ("{", "[]", "3", "x" * 300, "[" * 100_000)),
    ("llm.GlobalResourceConfig", "[1]"),
    ("llm.MemPoolConfig", ""),
    ("llm.HostMemPoolConfig", "1"),
    ("llm.ClusterInfo", "{"),
    ("llm.TransferBackend", "rdma"),
    ("llm.TransferBackend", ""),
    ("llm.TransferBackend", "TCP"),
    *(("llm.HeartbeatIntervalMs", text) for text in ("0", "-1", "1s")),
    ("llm.LinkTimeoutMs", "0"),
    ("llm.TransferThreads", "1025"),
    ("llm.TcpConnections", "-1"),
    ("llm.OutputMaxSize", "-1"),
    *(
        ("llm.MemoryUtilization", text)
        for text in ("1.01", "-0.1", "nan", "inf", "", ".", "e3", "1e999", "half")
    ),
    ("llm.VerifyTransfers", "crc"),
    *(
        ("llm.RetryPolicy", text)
        for text in ("on", "retries=1", "retries=-1,backoff_ms=2", "retries=1,backoff_ms=2 ")
    ),
    *(("llm.MetricsPort", text) for text in ("65536", "-1", "x", "")),
    ("llm.AdvertiseIp", "1.2.3"),
    ("llm.AdvertiseIp", ""),
    ("llm.AdvertiseIp", "0.0.0.0"),
    ("llm.AdvertiseIp", "::"),
    ("llm.AdvertiseIp", "[::1]"),
    ("llm.AdvertiseIp", "10.0.0.1:26000"),
    ("llm.AuthTokenFile", ""),
    ("llm.TlsCertFile", ""),
    ("ge.exec.deviceId", "0;1"),
    ("ge.exec.deviceId", "-1"),
    ("ge.session_device_id", "a"),
    ("ge.session_device_id", ""),
]


@pytest.mark.rule("3.24", "3.37", "3.44", "3.45", "3.47", "3.50", "3.56", "3.59", "3.60", "3.71", "3.72")
@pytest.mark.parametrize(("key", "text"), BAD, ids=lambda value: repr(value)[:40])
def test_e4_n2_bad_text_is_refused_naming_key_value_and_rule(key: str, text: str) -> None:
    given = {**ON, key: text}
    before = dict(given)
    with pytest.raises(ParamInvalidError) as caught:
        parse_options(given)
    said = str(caught.value)
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert said.startswith(f"{RULE_OF_KEY[key].keys[0]} (LLMConfig.{RULE_OF_KEY[key].prop}) is ")
    assert repr(text[:200])[:-1] in said
    assert "; it must be " in said
    assert len(said) < 500
    assert given == before


@pytest.mark.rule("3.47")
@pytest.mark.parametrize("number", ["65535", "0"])
def test_good_ends_are_taken(number: str) -> None:
    assert parsed(listenIpInfo=f"h:{number}").listen == ("h", int(number))
    assert parsed(LinkTotalTime=str(2**32 - 1)).link_total_time_s == 2**32 - 1
    assert parsed(LinkTotalTime="0").link_total_time_s == 120
    assert parsed(
        MemoryUtilization="1e-3", ClusterInfo="[]", deployResPath="", BufPoolCfg="x", OutputMaxSize="0"
    )


@pytest.mark.parametrize("options", [None, [], "x", 3])
def test_options_must_be_a_dict(options: Any) -> None:
    with pytest.raises(TypeError, match="options must be Mapping"):
        parse_options(options)


@pytest.mark.parametrize("options", [{1: "1"}, {"llm.LinkRetryCount": 1}, {"llm.AuthToken": b"s3cret"}])
def test_keys_and_values_must_be_text(options: Any) -> None:
    with pytest.raises(TypeError, match="option") as caught:
        parse_options(options)
    assert "s3cret" not in str(caught.value)


@pytest.mark.rule("3.73")
def test_unknown_keys() -> None:
    options = {**ON, "llm.Later": "1", "llm.Other": "", "ge.x": "1", "else": "2"}
    assert parse_options(options).unknown == ("llm.Later", "llm.Other")


LATER = {
    "llm.AuthToken": "s3cret",
    "llm.AuthTokenFile": "/t",
    "llm.TlsCertFile": "/c",
    "llm.TlsKeyFile": "/k",
    "llm.TlsCaFile": "/a",
    "llm.VerifyTransfers": "xxh3",
    "llm.RetryPolicy": "retries=3,backoff_ms=10",
    "llm.MetricsPort": "0",
}


@pytest.mark.rule("3.63", "3.64", "3.68", "3.69", "3.70")
@pytest.mark.parametrize(("key", "text"), LATER.items())
def test_an_option_of_a_later_version_is_not_silently_ignored(key: str, text: str) -> None:
    with pytest.raises(FeatureNotEnabledError, match="not in this version") as caught:
        parse_options({**ON, key: text})
    assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert str(caught.value).startswith(key)
    assert "s3cret" not in str(caught.value)


@pytest.mark.rule("3.60", "4.111")
@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1%eth0", "node-7.example", "127.0.0.1"])
def test_an_address_to_advertise(host: str) -> None:
    assert parsed(AdvertiseIp=host).advertise_ip == host
    assert parsed().advertise_ip is None


@pytest.mark.rule("3.68", "3.69")
def test_switched_off_later_options_are_fine() -> None:
    assert parsed(VerifyTransfers="off", RetryPolicy="off") == parsed()


def test_a_bad_token_is_not_shown() -> None:
    with pytest.raises(ParamInvalidError, match=r"llm\.AuthToken .* is \(not shown\)"):
        parsed(AuthToken="")


@pytest.mark.rule("3.34", "3.35", "3.37", "3.39")
@pytest.mark.parametrize(
    ("options", "accessible"),
    [
        ({"llm.EnableCacheManager": "1"}, False),
        ({"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}, True),
        ({"llm.LocalCommRes": ""}, True),
        ({"llm.LocalCommRes": '{"a": 1}'}, True),
        ({"llm.LocalCommRes": "", "llm.EnableRemoteCacheAccessible": "0"}, False),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "1"}, True),
        ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1", "llm.listenIpInfo": ":0"}, True),
        ({"llm.TransferBackend": "hixl", "llm.LocalCommRes": "", "llm.listenIpInfo": ":0"}, True),
        ({"llm.TransferBackend": "auto", "llm.EnableCacheManager": "1"}, False),
    ],
)
def test_mode(options: dict[str, str], accessible: bool) -> None:
    result = parse_options(options)
    assert result.accessible is accessible
    assert result.needs_local_ip is ("llm.LocalCommRes" not in options)
    assert result.backend == "auto"


@pytest.mark.rule("3.33", "3.36", "3.38", "3.39")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "llm.EnableCacheManager is missing; .*LLMConfig.enable_cache_manager = True"),
        ({"llm.EnableCacheManager": "0"}, "llm.EnableCacheManager is '0'; .*enable_cache_manager"),
        ({"llm.EnableCacheManager": "0", "llm.LocalCommRes": ""}, "llm.EnableCacheManager is '0'"),
        ({"llm.TransferBackend": "hixl", "llm.listenIpInfo": ":0"}, "needs llm.EnableCacheManager.*missing"),
        ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1"}, "needs llm.listenIpInfo.*missing"),
        (
            {"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "0", "llm.listenIpInfo": ":0"},
            "llm.EnableCacheManager is '0'",
        ),
        (
            {
                "llm.TransferBackend": "hixl",
                "llm.EnableCacheManager": "1",
                "llm.listenIpInfo": ":0",
                "llm.EnableRemoteCacheAccessible": "0",
            },
            "llm.EnableRemoteCacheAccessible is '0', but llm.TransferBackend 'hixl'",
        ),
    ],
)
def test_combinations_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(ParamInvalidError, match=text):
        parse_options(options)


@pytest.mark.parametrize(
    ("interval", "timeout", "used"), [("1000", "30000", 1000), ("1000", "600", 200), ("9", "1", 1)]
)
def test_heartbeats_fit_into_the_timeout(interval: str, timeout: str, used: int) -> None:
    options = parsed(HeartbeatIntervalMs=interval, LinkTimeoutMs=timeout)
    assert (options.heartbeat_interval_ms, options.link_timeout_ms) == (used, int(timeout))


@pytest.mark.rule("3.58")
def test_every_option_is_a_property_and_every_key_is_named_once() -> None:
    assert all(hasattr(LLMConfig, rule.prop) for rule in RULES)
    keys = [key for rule in RULES for key in rule.keys]
    assert len(keys) == len(set(keys)) == len(RULE_OF_KEY)
    assert len({rule.prop for rule in RULES}) == len(RULES)


@pytest.mark.rule("3.53")
@pytest.mark.parametrize("text", ["1,2", "", "-1", "1.5"])
def test_the_one_ge_option_with_a_rule_is_judged_in_a_dict_made_by_hand(text: str) -> None:
    with pytest.raises(ParamInvalidError, match=r"ge\.flowGraphMemMaxSize .* must be one number"):
        parse_options({"llm.EnableCacheManager": "1", "ge.flowGraphMemMaxSize": text})
    parse_options({"llm.EnableCacheManager": "1", "ge.flowGraphMemMaxSize": "123"})


NO_EFFECT = {
    "llm.EnableSwitchRole": "1",
    "llm.deployResPath": "/x",
    "llm.BufPoolCfg": "{}",
    "llm.ClusterInfo": '{"a": 1}',
    "llm.OutputMaxSize": "7",
    "llm.MemoryUtilization": "0.5",
    "llm.RdmaTrafficClass": "132",
    "llm.RdmaServiceLevel": "4",
    "llm.GlobalResourceConfig": '{"a": 1}',
    "ge.exec.deviceId": "3",
    "ge.session_device_id": "3",
    "ge.somethingElse": "x",
}


@pytest.mark.rule("3.25", "3.45", "3.50", "3.57")
@pytest.mark.parametrize("key", NO_EFFECT)
def test_what_nothing_here_reads_changes_nothing(key: str) -> None:
    """No warning either: it is known."""
    assert parse_options({**ON, key: NO_EFFECT[key]}) == parsed()


@pytest.mark.rule("3.41", "3.42", "3.43")
@pytest.mark.parametrize("text", ["auto", "local", "shm", "tcp", "nixl"])
def test_the_transports_that_can_be_named(text: str) -> None:
    assert parsed(TransferBackend=text) == Options(backend=text)
