"""Options: one table of keys, their properties and rules; the texts of ``init`` -> one frozen ``Options``.

Strategy: a rule reads a text (``read``); a property of LLMConfig first turns its value into that text
(``kind``) and then asks the same rule, so that both ways refuse the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_datadist._core import option_rules as rules
from llm_datadist._core.option_rules import BrokenRuleError
from llm_datadist._core.pool_config import PoolConfig, read_pool
from llm_datadist.checks import check_isinstance
from llm_datadist.enums import Placement
from llm_datadist.status import FeatureNotEnabledError, ParamInvalidError

DEFAULT_LINK_TOTAL_TIME_S = 120
_HEARTBEATS_PER_TIMEOUT = 3


@dataclass(frozen=True, slots=True)
class Options:
    """What the texts given to ``init`` mean.

    Attributes:
        sync_kv_timeout_ms: Time that one pull or push may take.
        listen: Host (IPv6 without brackets) and port of the listener; None: there is none.
        accessible: Mode B (True) or mode A.
        backend: "auto", or the name of the only transport to use.
        link_total_time_s: Time for a two-sided ``link``.
        link_retry_count: Attempts to reach a peer, within the time of the call.
        heartbeat_interval_ms: Time between heartbeats; at least three fit into the link timeout.
        link_timeout_ms: Silence after which a link is down.
        allow_multiple_instances: Whether other engines may be there in this process.
        allow_ptrace: Whether any process of this user may read our memory under Yama.
        transfer_threads: Movers of one transfer; 0: by machine.
        tcp_connections: Data connections per link; 0: by machine.
        advertise_ip: Host that peers are told for the listener's port; None: they know what they dialled.
        pools: The pool of each placement that has one.
        needs_local_ip: Whether each cluster to link needs a local address (no LocalCommRes was given).
        unknown: Keys that begin with ``llm.``, and fields of pools, that mean nothing here.
    """

    sync_kv_timeout_ms: int = 1000
    listen: tuple[str, int] | None = None
    accessible: bool = False
    backend: str = "auto"
    link_total_time_s: int = DEFAULT_LINK_TOTAL_TIME_S
    link_retry_count: int = 1
    heartbeat_interval_ms: int = 1000
    link_timeout_ms: int = 30000
    allow_multiple_instances: bool = False
    allow_ptrace: bool = False
    transfer_threads: int = 0
    tcp_connections: int = 0
    advertise_ip: str | None = None
    needs_local_ip: bool = True
    pools: Mapping[Placement, PoolConfig] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of value.

    Attributes:
        to_text: Name and property value -> text; raises TypeError or ValueError.
        read: Text -> its meaning; raises ``BrokenRuleError``.
    """

    to_text: Callable[[str, Any], str]
    read: Callable[[str], Any]


def _never(text: str) -> bool:
    return False


def _always(text: str) -> bool:
    return True


def _not_off(text: str) -> bool:
    return text != "off"


@dataclass(frozen=True, slots=True)
class Rule:
    """One option.

    Attributes:
        prop: The property of LLMConfig.
        keys: The option keys that carry it; all carry the same text.
        form: What its values are.
        secret: The value is never shown.
        only_at_init: The contract has the text judged at init, not by the setter.
        omit: A text that the property leaves out of the dict.
        later: Whether a text asks for something that this version does not have.
    """

    prop: str
    keys: tuple[str, ...]
    form: Form
    secret: bool = False
    only_at_init: bool = False
    omit: str | None = None
    later: Callable[[str], bool] = _never

    def text_of(self, value: Any) -> str:
        """The text of a property value.

        Raises:
            TypeError: A wrong type.
            ValueError: No text could stand for it.
            ParamInvalidError: See :meth:`check`.
        """
        text = self.form.to_text(self.prop, value)
        if not self.only_at_init:
            self.check(text)
        return text

    def check(self, text: str) -> Any:
        """What a text means.

        Raises:
            ParamInvalidError: Names key, property, value and rule.
        """
        try:
            return self.form.read(text)
        except BrokenRuleError as exc:
            shown = "(not shown)" if self.secret else repr(text if len(text) <= 200 else text[:200] + "...")
            raise ParamInvalidError(
                f"{self.keys[0]} (LLMConfig.{self.prop}) is {shown}; it must be {exc}"
            ) from exc


def _str(read: Callable[[str], Any]) -> Form:
    return Form(rules.text_of_str, read)


def _int(low: int, high: int) -> Form:
    return Form(rules.text_of_int, rules.number_reader(low, high))


def _number(low: int, high: int) -> Form:
    return Form(rules.text_of_number, rules.number_reader(low, high))


def _read_pool(text: str) -> PoolConfig:
    return read_pool(rules.json_reader(False)(text))


_DEVICES = Form(rules.text_of_devices, rules.read_devices)
_FLAG = Form(rules.text_of_flag, rules.read_flag)
_SHARE = Form(rules.text_of_share, rules.read_share)
_SECRET = Form(rules.text_of_secret, rules.read_filled)
_METRICS = Form(rules.text_of_number, rules.read_metrics)
_ANY, _FILLED = _str(rules.read_any), _str(rules.read_filled)
_POOL, _OBJECT_OR_EMPTY = _str(_read_pool), _str(rules.json_reader(True))
_UINT32 = _int(0, 2**32 - 1)
_MILLIS = _number(1, 2**31 - 1)

RULES: tuple[Rule, ...] = (
    Rule("device_id", ("ge.exec.deviceId", "ge.session_device_id"), _DEVICES, only_at_init=True),
    Rule("sync_kv_timeout", ("llm.SyncKvCacheWaitTime",), _MILLIS),
    Rule("listen_ip_info", ("llm.listenIpInfo",), _str(rules.read_listen)),
    Rule("enable_cache_manager", ("llm.EnableCacheManager",), _FLAG),
    Rule("enable_remote_cache_accessible", ("llm.EnableRemoteCacheAccessible",), _FLAG),
    Rule("local_comm_res", ("llm.LocalCommRes",), _OBJECT_OR_EMPTY),
    Rule("transfer_backend", ("llm.TransferBackend",), _str(rules.read_backend)),
    Rule("global_resource_config", ("llm.GlobalResourceConfig",), _OBJECT_OR_EMPTY, only_at_init=True),
    Rule("mem_pool_cfg", ("llm.MemPoolConfig",), _POOL, only_at_init=True),
    Rule("host_mem_pool_cfg", ("llm.HostMemPoolConfig",), _POOL, only_at_init=True),
    Rule("link_total_time", ("llm.LinkTotalTime",), _UINT32),
    Rule("link_retry_count", ("llm.LinkRetryCount",), _int(1, 100)),
    Rule("rdma_traffic_class", ("llm.RdmaTrafficClass",), _UINT32),
    Rule("rdma_service_level", ("llm.RdmaServiceLevel",), _UINT32),
    Rule("enable_switch_role", ("llm.EnableSwitchRole",), _FLAG, omit="0"),
    Rule("deploy_res_path", ("llm.deployResPath",), _ANY),
    Rule("buf_pool_cfg", ("llm.BufPoolCfg",), _ANY),
    Rule("cluster_info", ("llm.ClusterInfo",), _str(rules.read_json)),
    Rule("output_max_size", ("llm.OutputMaxSize",), _number(0, 2**63 - 1)),
    Rule("mem_utilization", ("llm.MemoryUtilization",), _SHARE),
    Rule("allow_multiple_instances", ("llm.AllowMultipleInstances",), _FLAG),
    Rule("advertise_ip", ("llm.AdvertiseIp",), _str(rules.read_advertised)),
    Rule("heartbeat_interval_ms", ("llm.HeartbeatIntervalMs",), _MILLIS),
    Rule("link_timeout_ms", ("llm.LinkTimeoutMs",), _MILLIS),
    Rule("auth_token", ("llm.AuthToken",), _SECRET, secret=True, later=_always),
    Rule("auth_token_file", ("llm.AuthTokenFile",), _FILLED, later=_always),
    Rule("tls_cert_file", ("llm.TlsCertFile",), _FILLED, later=_always),
    Rule("tls_key_file", ("llm.TlsKeyFile",), _FILLED, later=_always),
    Rule("tls_ca_file", ("llm.TlsCaFile",), _FILLED, later=_always),
    Rule("allow_ptrace", ("llm.AllowPtrace",), _FLAG),
    # The upper ends keep a typing error from asking for more threads or descriptors than a machine has.
    Rule("transfer_threads", ("llm.TransferThreads",), _number(0, 1024)),
    Rule("tcp_connections", ("llm.TcpConnections",), _number(0, 256)),
    Rule("verify_transfers", ("llm.VerifyTransfers",), _str(rules.read_verify), later=_not_off),
    Rule("retry_policy", ("llm.RetryPolicy",), _str(rules.read_retry), later=_not_off),
    Rule("metrics_port", ("llm.MetricsPort",), _METRICS, later=_always),
)
"""Every option that a property of LLMConfig stands for."""

RULE_OF_PROP = {rule.prop: rule for rule in RULES}
RULE_OF_KEY = {key: rule for rule in RULES for key in rule.keys}

_FLOW_GRAPH = "ge.flowGraphMemMaxSize"


def check_flow_graph_size(options: Mapping[str, str]) -> None:
    """The one key of ``ge_options`` that has a rule; it comes by the property or in a dict made by hand.

    Raises:
        ParamInvalidError: It is there and not a digit string of one value.
    """
    size = options.get(_FLOW_GRAPH, "0")
    if not (size.isascii() and size.isdigit()):
        raise ParamInvalidError(
            f"{_FLOW_GRAPH} (LLMConfig.ge_options) is {size!r}; it must be one number, in digits"
        )


def parse_options(options: Mapping[str, str]) -> Options:
    """The meaning of the texts given to ``init``.

    Raises:
        TypeError: Not a dict of str to str.
        ParamInvalidError: A bad value; names key, value and rule.
        FeatureNotEnabledError: An option that this version does not have yet; names the key.
    """
    check_isinstance("options", options, Mapping)
    for key, text in options.items():
        check_isinstance("an option key", key, str)
        if not isinstance(text, str):
            raise TypeError(f"options[{key!r}] must be a str, not {type(text).__name__}")
    check_flow_graph_size(options)
    known = {key: RULE_OF_KEY[key] for key in options if key in RULE_OF_KEY}
    values = {rule.prop: rule.check(options[key]) for key, rule in known.items()}
    _refuse_later(options)
    link_timeout_ms = values.get("link_timeout_ms", 30000)
    most_ms = max(1, link_timeout_ms // _HEARTBEATS_PER_TIMEOUT)
    return Options(
        sync_kv_timeout_ms=values.get("sync_kv_timeout", 1000),
        listen=values.get("listen_ip_info"),
        advertise_ip=values.get("advertise_ip"),
        accessible=_mode(values, hixl=options.get("llm.TransferBackend") == "hixl"),
        backend=values.get("transfer_backend", "auto"),
        link_total_time_s=values.get("link_total_time", 0) or DEFAULT_LINK_TOTAL_TIME_S,
        link_retry_count=values.get("link_retry_count", 1),
        heartbeat_interval_ms=min(values.get("heartbeat_interval_ms", 1000), most_ms),
        link_timeout_ms=link_timeout_ms,
        allow_multiple_instances=values.get("allow_multiple_instances", False),
        allow_ptrace=values.get("allow_ptrace", False),
        transfer_threads=values.get("transfer_threads", 0),
        tcp_connections=values.get("tcp_connections", 0),
        needs_local_ip="local_comm_res" not in values,
        pools=_pools(values),
        unknown=_unknown(options, values),
    )


def _pools(values: Mapping[str, Any]) -> dict[Placement, PoolConfig]:
    found = {Placement.DEVICE: values.get("mem_pool_cfg"), Placement.HOST: values.get("host_mem_pool_cfg")}
    return {placement: config for placement, config in found.items() if config is not None}


def _unknown(options: Mapping[str, str], values: Mapping[str, Any]) -> tuple[str, ...]:
    keys = [key for key in options if key.startswith("llm.") and key not in RULE_OF_KEY]
    for prop in ("mem_pool_cfg", "host_mem_pool_cfg"):
        config = values.get(prop)
        keys += [f"{RULE_OF_PROP[prop].keys[0]}.{name}" for name in (config.unknown if config else ())]
    return tuple(keys)


def _refuse_later(options: Mapping[str, str]) -> None:
    """An option that protects or changes something must not be taken and then do nothing."""
    for key, text in options.items():
        rule = RULE_OF_KEY.get(key)
        if rule is None:
            continue
        if rule.later(text):
            raise FeatureNotEnabledError(
                f"{key} (LLMConfig.{rule.prop}) is not in this version; leave it out"
            )


def _mode(values: Mapping[str, Any], *, hixl: bool) -> bool:
    """Whether mode B is on; checks what depends on more than one option."""
    implied = hixl or "local_comm_res" in values
    if hixl and "listen_ip_info" not in values:
        raise ParamInvalidError(
            "llm.TransferBackend is 'hixl', which needs llm.listenIpInfo "
            "(LLMConfig.listen_ip_info); it is missing"
        )
    manager = values.get("enable_cache_manager")
    if manager is None and hixl and "local_comm_res" not in values:
        raise ParamInvalidError(
            "llm.TransferBackend is 'hixl', which needs llm.EnableCacheManager '1' "
            "(LLMConfig.enable_cache_manager = True); it is missing"
        )
    if not (implied if manager is None else manager):
        shown = "missing" if manager is None else "'0'"
        raise ParamInvalidError(
            f"llm.EnableCacheManager is {shown}; it must be '1': set LLMConfig.enable_cache_manager = True"
        )
    accessible: bool = values.get("enable_remote_cache_accessible", implied)
    if hixl and not accessible:
        raise ParamInvalidError(
            "llm.EnableRemoteCacheAccessible is '0', but llm.TransferBackend 'hixl' needs '1': "
            "set LLMConfig.enable_remote_cache_accessible = True or leave it out"
        )
    return accessible
