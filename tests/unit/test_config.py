"""LLMConfig: which option keys a property writes, and what a setter refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist._core.options import parse_options
from llm_datadist.config import LLMConfig, LlmConfig
from llm_datadist.status import ParamInvalidError

GOOD: list[tuple[str, Any, dict[str, str]]] = [
    ("device_id", 3, {"ge.exec.deviceId": "3", "ge.session_device_id": "3"}),
    ("device_id", [0, 1], {"ge.exec.deviceId": "0;1", "ge.session_device_id": "0;1"}),
    ("device_id", (np.int32(2),), {"ge.exec.deviceId": "2", "ge.session_device_id": "2"}),
    ("sync_kv_timeout", 5, {"llm.SyncKvCacheWaitTime": "5"}),
    ("sync_kv_timeout", "5", {"llm.SyncKvCacheWaitTime": "5"}),
    ("sync_kv_timeout", np.uint16(5), {"llm.SyncKvCacheWaitTime": "5"}),
    ("listen_ip_info", "[::1]:0", {"llm.listenIpInfo": "[::1]:0"}),
    ("enable_cache_manager", True, {"llm.EnableCacheManager": "1"}),
    ("enable_cache_manager", False, {"llm.EnableCacheManager": "0"}),
    ("enable_remote_cache_accessible", True, {"llm.EnableRemoteCacheAccessible": "1"}),
    ("local_comm_res", "", {"llm.LocalCommRes": ""}),
    ("transfer_backend", "hixl", {"llm.TransferBackend": "hixl"}),
    ("global_resource_config", "{}", {"llm.GlobalResourceConfig": "{}"}),
    ("global_resource_config", "judged at init", {"llm.GlobalResourceConfig": "judged at init"}),
    ("mem_pool_cfg", '{"memory_size": 1}', {"llm.MemPoolConfig": '{"memory_size": 1}'}),
    ("host_mem_pool_cfg", "{}", {"llm.HostMemPoolConfig": "{}"}),
    ("link_total_time", 2**32 - 1, {"llm.LinkTotalTime": "4294967295"}),
    ("link_retry_count", 100, {"llm.LinkRetryCount": "100"}),
    ("rdma_traffic_class", 0, {"llm.RdmaTrafficClass": "0"}),
    ("rdma_service_level", 4, {"llm.RdmaServiceLevel": "4"}),
    ("enable_switch_role", True, {"llm.EnableSwitchRole": "1"}),
    ("enable_switch_role", False, {}),
    ("deploy_res_path", "/x", {"llm.deployResPath": "/x"}),
    ("buf_pool_cfg", "{}", {"llm.BufPoolCfg": "{}"}),
    ("cluster_info", '{"a": []}', {"llm.ClusterInfo": '{"a": []}'}),
    ("output_max_size", 10, {"llm.OutputMaxSize": "10"}),
    ("mem_utilization", 0.95, {"llm.MemoryUtilization": "0.95"}),
    ("mem_utilization", 1, {"llm.MemoryUtilization": "1"}),
    ("mem_utilization", 1e-7, {"llm.MemoryUtilization": "1e-07"}),
    ("allow_multiple_instances", True, {"llm.AllowMultipleInstances": "1"}),
    ("advertise_ip", "::1", {"llm.AdvertiseIp": "::1"}),
    ("heartbeat_interval_ms", 10, {"llm.HeartbeatIntervalMs": "10"}),
    ("link_timeout_ms", 100, {"llm.LinkTimeoutMs": "100"}),
    ("auth_token", "s3cret", {"llm.AuthToken": "s3cret"}),
    ("auth_token_file", "/t", {"llm.AuthTokenFile": "/t"}),
    ("tls_cert_file", "/c", {"llm.TlsCertFile": "/c"}),
    ("tls_key_file", "/k", {"llm.TlsKeyFile": "/k"}),
    ("tls_ca_file", "/a", {"llm.TlsCaFile": "/a"}),
    ("allow_ptrace", False, {"llm.AllowPtrace": "0"}),
    ("transfer_threads", 2, {"llm.TransferThreads": "2"}),
    ("tcp_connections", 2, {"llm.TcpConnections": "2"}),
    ("verify_transfers", "off", {"llm.VerifyTransfers": "off"}),
    ("retry_policy", "retries=2,backoff_ms=5", {"llm.RetryPolicy": "retries=2,backoff_ms=5"}),
    ("metrics_port", 0, {"llm.MetricsPort": "0"}),
    ("metrics_port", "127.0.0.1:9", {"llm.MetricsPort": "127.0.0.1:9"}),
]


@pytest.mark.rule(
    "3.20", "3.22", "3.23", "3.26", "3.32", "3.34", "3.45", "3.46", "3.50", "3.54", "3.55", "3.58"
)
@pytest.mark.parametrize(("name", "value", "options"), GOOD)
def test_property_writes_its_keys_only(name: str, value: Any, options: dict[str, str]) -> None:
    config = LLMConfig()
    assert getattr(config, name) is None
    setattr(config, name, value)
    assert getattr(config, name) == value
    assert config.generate_options() == config.gen_options() == options


BAD: list[tuple[str, Any, type[Exception]]] = [
    *(
        ("listen_ip_info", text, ParamInvalidError)
        for text in ("127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:3.14")
    ),
    ("listen_ip_info", "", ParamInvalidError),
    ("listen_ip_info", "a:b:c", ParamInvalidError),
    ("listen_ip_info", 26000, TypeError),
    *(("link_retry_count", count, ParamInvalidError) for count in (0, -1, 101)),
    ("link_retry_count", "3", TypeError),
    *(("link_total_time", seconds, ParamInvalidError) for seconds in (-1, 2**32)),
    *(("sync_kv_timeout", value, ParamInvalidError) for value in (0, "-5", "abc", -5, 2**31)),
    *(("sync_kv_timeout", value, TypeError) for value in (1.5, True, None)),
    ("device_id", -1, ValueError),
    ("device_id", [0, -1], ValueError),
    ("device_id", "0", TypeError),
    ("device_id", [0.0], TypeError),
    ("device_id", True, TypeError),
    ("enable_cache_manager", 1, TypeError),
    ("enable_cache_manager", "1", TypeError),
    ("local_comm_res", "[", ParamInvalidError),
    ("local_comm_res", None, TypeError),
    ("transfer_backend", "gloo", ParamInvalidError),
    ("global_resource_config", {}, TypeError),
    ("rdma_service_level", 2**32, ParamInvalidError),
    ("cluster_info", "{", ParamInvalidError),
    ("mem_utilization", 1.5, ParamInvalidError),
    ("mem_utilization", float("nan"), ParamInvalidError),
    ("mem_utilization", "0.5", TypeError),
    ("allow_ptrace", "0", TypeError),
    ("metrics_port", 65536, ParamInvalidError),
    ("verify_transfers", "crc", ParamInvalidError),
]


@pytest.mark.rule("3.21", "3.23", "3.26", "3.49", "3.56")
@pytest.mark.parametrize(("name", "value", "error"), BAD)
def test_e4_setter_refuses_naming_property_and_value(name: str, value: Any, error: type[Exception]) -> None:
    config = LLMConfig()
    with pytest.raises(error, match=name) as caught:
        setattr(config, name, value)
    assert type(caught.value) is error
    shown = str(value[-1] if isinstance(value, list) else value)
    assert shown in str(caught.value)
    assert (getattr(config, name), config.generate_options()) == (None, {})


@pytest.mark.rule("3.44")
def test_backend_text_lists_the_choices() -> None:
    with pytest.raises(ParamInvalidError, match="auto, local, shm, tcp, nixl, hixl"):
        LLMConfig().transfer_backend = "rdma"


def test_a_token_of_a_wrong_type_is_not_shown() -> None:
    with pytest.raises(TypeError, match="auth_token must be str, not bytes") as caught:
        LLMConfig().auth_token = b"s3cret"  # type: ignore[assignment]
    assert "s3cret" not in str(caught.value)


@pytest.mark.rule("3.22")
def test_a_refused_value_leaves_the_former_one() -> None:
    config = LLMConfig()
    config.link_retry_count = 3
    with pytest.raises(ParamInvalidError):
        config.link_retry_count = 0
    assert config.generate_options() == {"llm.LinkRetryCount": "3"}


def test_a_misspelt_property_is_refused() -> None:
    with pytest.raises(AttributeError):
        LLMConfig().listen_ipinfo = ":0"  # type: ignore[attr-defined]


@pytest.mark.rule("3.51", "3.52")
def test_ge_options_are_merged_and_can_be_edited_in_place() -> None:
    config = LLMConfig()
    config.ge_options["ge.a"] = "1"
    config.ge_options = {**config.ge_options, "ge.flowGraphMemMaxSize": "123", "ge.exec.deviceId": "7"}
    config.ge_options["ge.b"] = ""
    config.device_id = 0
    options = config.generate_options()
    assert options == {
        "ge.a": "1",
        "ge.b": "",
        "ge.flowGraphMemMaxSize": "123",
        "ge.exec.deviceId": "0",
        "ge.session_device_id": "0",
    }
    options["ge.a"] = "2"
    assert config.generate_options()["ge.a"] == "1"
    assert config.ge_options["ge.exec.deviceId"] == "7"


@pytest.mark.rule("3.53")
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("x", TypeError),
        ({"ge.a": 1}, TypeError),
        ({1: "a"}, TypeError),
        ({"ge.flowGraphMemMaxSize": 123}, TypeError),
        ({"ge.flowGraphMemMaxSize": "1,2"}, ParamInvalidError),
        ({"ge.flowGraphMemMaxSize": ""}, ParamInvalidError),
    ],
)
def test_bad_ge_options(value: Any, error: type[Exception]) -> None:
    config = LLMConfig()
    with pytest.raises(error, match="ge_options"):
        config.ge_options = value
    if isinstance(value, dict):
        config.ge_options.update(value)
        with pytest.raises(error, match="ge_options"):
            config.generate_options()


@pytest.mark.rule("3.20")
def test_generated_options_are_what_init_reads() -> None:
    config = LlmConfig()
    config.enable_cache_manager = True
    config.listen_ip_info = "[::1]:7"
    config.sync_kv_timeout = "20"
    assert config.generate_options() == {
        "llm.EnableCacheManager": "1",
        "llm.listenIpInfo": "[::1]:7",
        "llm.SyncKvCacheWaitTime": "20",
    }
    options = parse_options(config.generate_options())
    assert (options.listen, options.sync_kv_timeout_ms) == (("::1", 7), 20)
    assert LlmConfig is LLMConfig


@pytest.mark.rule("3.24")
def test_more_than_one_device_is_refused_at_init() -> None:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.device_id = [0, 1]
    with pytest.raises(ParamInvalidError, match=r"LLMConfig\.device_id\) is '0;1'; it must be one device id"):
        parse_options(config.generate_options())


def test_properties_are_documented() -> None:
    assert (LLMConfig.sync_kv_timeout.__doc__ or "").startswith("Time one pull or push may take")


@pytest.mark.parametrize("devices", [[], ()])
def test_at_least_one_device_is_named(devices: Any) -> None:
    with pytest.raises(ValueError, match="device_id"):
        LLMConfig().device_id = devices
