"""LLMConfig: the options of ``init`` as checked properties.

Each property is one row of the table in ``_core.options``, which also checks the raw texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, overload

from llm_datadist._core.options import RULE_OF_PROP, check_flow_graph_size
from llm_datadist.checks import check_isinstance

T = TypeVar("T")


class _Option(Generic[T]):
    """A property that checks its value by the rule of its name; None until it is set."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._rule = RULE_OF_PROP[name]

    @overload
    def __get__(self, config: None, owner: type) -> _Option[T]: ...
    @overload
    def __get__(self, config: LLMConfig, owner: type) -> T | None: ...
    def __get__(self, config: LLMConfig | None, owner: type) -> _Option[T] | T | None:
        if config is None:
            return self
        return config._values.get(self._name)

    def __set__(self, config: LLMConfig, value: T) -> None:
        config._texts[self._name] = self._rule.text_of(value)
        config._values[self._name] = value


class LLMConfig:
    """Options of ``LLMDataDist.init``; only what was set appears in ``generate_options()``.

    A setter refuses a wrong type with TypeError and a bad value with ValueError or ParamInvalidError,
    naming it. A name that is not an option is refused with AttributeError.
    """

    __slots__ = ("_ge_options", "_texts", "_values")

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._ge_options: dict[str, str] = {}

    device_id = _Option[int | Sequence[int]]("Device id; a list must have one entry.")
    sync_kv_timeout = _Option[int | str]("Time one pull or push may take, ms. Default 1000.")
    listen_ip_info = _Option[str]('Listener: "ip:port", "[IPv6]:port", "name:port"; port 0 = any free.')
    enable_cache_manager = _Option[bool]("Must be True.")
    enable_remote_cache_accessible = _Option[bool]("Mode B (True) or mode A (default).")
    local_comm_res = _Option[str]('"" or a JSON object; its presence turns the cache manager and mode B on.')
    transfer_backend = _Option[str]('"auto" (default), "hixl", or the transport to force.')
    global_resource_config = _Option[str]('"" or a JSON object for transports that know it.')
    mem_pool_cfg = _Option[str]("Pool of device memory, a JSON object.")
    host_mem_pool_cfg = _Option[str]("Pool of host memory, a JSON object.")
    link_total_time = _Option[int]("Time for link(), s; 0 = 120 s.")
    link_retry_count = _Option[int]("Attempts to link, 1..100. Default 1.")
    rdma_traffic_class = _Option[int]("uint32, for transports that know it.")
    rdma_service_level = _Option[int]("uint32, for transports that know it.")
    enable_switch_role = _Option[bool]("Accepted, no effect.")
    deploy_res_path = _Option[str]("Accepted, no effect.")
    buf_pool_cfg = _Option[str]("Accepted, no effect.")
    cluster_info = _Option[str]("JSON; accepted, no effect.")
    output_max_size = _Option[int | str]("Accepted, no effect.")
    mem_utilization = _Option[float]("0..1; accepted, no effect.")

    allow_multiple_instances = _Option[bool]("Allows other initialised LLMDataDist in this process.")
    advertise_ip = _Option[str]("Address that peers on other hosts are told.")
    heartbeat_interval_ms = _Option[int | str]("Time between heartbeats. Default 1000.")
    link_timeout_ms = _Option[int | str]("Silence after which a link is down. Default 30000.")
    auth_token = _Option[str]("Secret that both sides of a link must know.")
    auth_token_file = _Option[str]("File that holds it.")
    tls_cert_file = _Option[str]("Certificate of this side.")
    tls_key_file = _Option[str]("Its key.")
    tls_ca_file = _Option[str]("Authorities that peers' certificates must come from.")
    allow_ptrace = _Option[bool]("Lets peers on this host read our memory under Yama ptrace_scope 1.")
    transfer_threads = _Option[int | str]("Movers of one transfer; 0 = by machine.")
    tcp_connections = _Option[int | str]("Data connections per link; 0 = by machine.")
    verify_transfers = _Option[str]('"off" (default) or "xxh3".')
    retry_policy = _Option[str]('"off" (default) or "retries=N,backoff_ms=M".')
    metrics_port = _Option[int | str]('Port on loopback, or "ip:port"; 0 = any.')

    @property
    def ge_options(self) -> dict[str, str]:
        """More options, merged as they are; the dict may be edited in place."""
        return self._ge_options

    @ge_options.setter
    def ge_options(self, value: dict[str, str]) -> None:
        self._ge_options = _checked_ge_options(value)

    def generate_options(self) -> dict[str, str]:
        """The dict for ``LLMDataDist.init``, a new one with each call.

        Raises:
            TypeError: ``ge_options`` was edited into something that is not str to str.
            ParamInvalidError: ge.flowGraphMemMaxSize in it is not a digit string of one value.
        """
        options = dict(_checked_ge_options(self._ge_options))
        for name, text in self._texts.items():
            rule = RULE_OF_PROP[name]
            if text != rule.omit:
                options.update(dict.fromkeys(rule.keys, text))
        return options

    gen_options = generate_options


def _checked_ge_options(options: Any) -> dict[str, str]:
    check_isinstance("ge_options", options, dict)
    for key, text in options.items():
        check_isinstance("a key of ge_options", key, str)
        check_isinstance(f"ge_options[{key!r}]", text, str)
    check_flow_graph_size(options)
    checked: dict[str, str] = options
    return checked


LlmConfig = LLMConfig
"""Another name for :class:`LLMConfig`."""
