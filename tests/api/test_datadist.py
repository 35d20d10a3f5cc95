"""LLMDataDist: the order of its life, and the arguments of its link calls."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    CacheManager,
    EngineFinalizedError,
    FeatureNotEnabledError,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinkedError,
    ParamInvalidError,
)
from tests.api.conftest import OPTIONS, Make
from tests.support.fake_engine import FakeEngine

OK, BAD = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID
ALREADY, FAILED = LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_LINK_FAILED


def cluster(cluster_id: int | None = 2, *, local: int = 1, remote: int = 1) -> LLMClusterInfo:
    info = LLMClusterInfo()
    if cluster_id is not None:
        info.remote_cluster_id = cluster_id
    for _ in range(local):
        info.append_local_ip_info("127.0.0.1", 0)
    for i in range(remote):
        info.append_remote_ip_info("10.0.0.1", 26000 + i)
    return info


# ---- construction and life ---------------------------------------------------------------------------


@pytest.mark.rule("3.1")
@pytest.mark.parametrize(
    ("role", "cluster_id", "error", "text"),
    [
        (1, 1, TypeError, "role must be LLMRole, not int"),
        (LLMRole.MIX, "1", TypeError, "cluster_id must be an int, not str"),
        (LLMRole.MIX, True, TypeError, "cluster_id must be an int, not bool"),
        (LLMRole.MIX, 1.0, TypeError, "cluster_id must be an int, not float"),
        (LLMRole.MIX, -1, ValueError, "cluster_id is -1"),
        (LLMRole.MIX, 2**64, ValueError, "cluster_id is 18446744073709551616"),
    ],
)
def test_constructor_refuses(role: Any, cluster_id: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LLMDataDist(role, cluster_id)


@pytest.mark.rule("3.1")
def test_properties_need_no_init() -> None:
    dist = LLMDataDist(LLMRole.MIX, np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert (dist.role, dist.cluster_id, type(dist.cluster_id)) == (LLMRole.MIX, 2**64 - 1, int)
    dist.finalize()


USES: list[Any] = [
    lambda d: d.cache_manager,
    lambda d: d.kv_cache_manager,
    lambda d: d.listen_address,
    lambda d: d.link_clusters("wrong", "too"),
    lambda d: d.unlink_clusters("wrong", "too"),
    lambda d: d.check_link_status("wrong"),
    lambda d: d.links(),
    lambda d: d.link_error("wrong"),
]


@pytest.mark.rule("1.22", "1.37", "1.38")
@pytest.mark.parametrize("use", USES)
def test_e1_state_is_checked_before_arguments(use: Any, make: Make) -> None:
    with pytest.raises(
        RuntimeError, match=r"LLMDataDist 7 is not initialised; call init\(options\) first"
    ) as caught:
        use(LLMDataDist(LLMRole.MIX, 7))
    assert not isinstance(caught.value, LLMException)
    dist, _ = make()
    dist.finalize()
    with pytest.raises(EngineFinalizedError, match="LLMDataDist 1 is finalized") as ended:
        use(dist)
    assert ended.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED


@pytest.mark.rule("3.2", "3.3", "3.4", "3.7")
def test_init_starts_one_engine_with_parsed_options(engines: list[FakeEngine]) -> None:
    dist, options = LLMDataDist(LLMRole.PROMPT, 9), {**OPTIONS, "llm.listenIpInfo": "[::1]:7"}
    before = dict(options)
    dist.init(options)
    dist.init({"not": "looked at"})
    assert options == before
    assert len(engines) == 1
    assert (engines[0].role, engines[0].cluster_id) == (LLMRole.PROMPT, 9)
    assert engines[0].options.listen == ("::1", 7)
    assert dist.listen_address == ("::1", 7)
    assert isinstance(dist.cache_manager, CacheManager)
    assert dist.cache_manager is dist.cache_manager
    dist.finalize()
    dist.finalize()
    assert engines[0].calls == [("start",), ("finalize",)]


def test_init_after_finalize_is_a_new_life(engines: list[FakeEngine]) -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 9)
    dist.init(OPTIONS)
    manager = dist.cache_manager
    dist.finalize()
    with pytest.raises(EngineFinalizedError):
        manager.unregister_cache(1)
    dist.init(OPTIONS)
    manager.unregister_cache(1)
    assert [len(engine.calls) for engine in engines] == [2, 2]
    dist.finalize()


@pytest.mark.rule("3.63", "4.106")
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (None, TypeError, "options must be"),
        ({"llm.EnableCacheManager": 1}, TypeError, "llm.EnableCacheManager"),
        ({}, ParamInvalidError, "enable_cache_manager"),
        ({**OPTIONS, "llm.listenIpInfo": "a:b:c"}, ParamInvalidError, "'a:b:c'"),
        ({**OPTIONS, "llm.AuthToken": "x"}, FeatureNotEnabledError, "llm.AuthToken"),
    ],
)
@pytest.mark.rule("R.5", "S.1", "S.2")
def test_e4_refused_options_start_nothing(
    options: Any, error: type[Exception], text: str, engines: list[FakeEngine]
) -> None:
    dist, threads = LLMDataDist(LLMRole.PROMPT, 9), threading.active_count()
    with pytest.raises(error, match=text):
        dist.init(options)
    assert (engines, threading.active_count()) == ([], threads)
    with pytest.raises(RuntimeError, match="not initialised"):
        dist.links()
    dist.init(OPTIONS)
    dist.finalize()


def test_a_failed_start_leaves_the_object_uninitialised(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: FakeEngine) -> None:
        raise LLMException("cannot listen", status_code=LLMStatusCode.LLM_FAILED)

    dist = LLMDataDist(LLMRole.PROMPT, 9)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "start", start)
        with pytest.raises(LLMException, match="cannot listen"):
            dist.init(OPTIONS)
    with pytest.raises(RuntimeError, match="not initialised"):
        dist.links()
    other = LLMDataDist(LLMRole.PROMPT, 10)
    other.init(OPTIONS)
    other.finalize()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)  # a forked child may use it: the parent never did
        dist.init(OPTIONS)
        dist.finalize()


@pytest.mark.rule("3.5")
def test_c3_a_second_instance_needs_the_option(make: Make) -> None:
    first, _ = make()
    second = LLMDataDist(LLMRole.PROMPT, 2)
    with pytest.raises(LLMException, match=r"llm\.AllowMultipleInstances") as caught:
        second.init(OPTIONS)
    assert caught.value.status_code == LLMStatusCode.LLM_FAILED
    assert first.links()
    make(AllowMultipleInstances="1")
    first.finalize()
    with pytest.raises(LLMException, match=r"llm\.AllowMultipleInstances"):
        second.init(OPTIONS)


def test_an_object_that_nobody_holds_is_still_initialised(engines: list[FakeEngine]) -> None:
    LLMDataDist(LLMRole.PROMPT, 2).init(OPTIONS)
    with pytest.raises(LLMException, match=r"llm\.AllowMultipleInstances"):
        LLMDataDist(LLMRole.PROMPT, 3).init(OPTIONS)
    from llm_datadist import _instances

    _instances._finalize_all()
    assert engines[0].calls == [("start",), ("finalize",)]


@pytest.mark.rule("3.4")
def test_threads_that_init_at_once_start_one_engine(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    dist, starting, second_ended = LLMDataDist(LLMRole.PROMPT, 2), threading.Event(), threading.Event()

    def start(self: FakeEngine) -> None:
        starting.set()
        second_ended.wait(0.1)  # it must not: it waits for this start

    def second() -> None:
        assert starting.wait(10)
        try:
            dist.init(OPTIONS)
        finally:
            second_ended.set()

    monkeypatch.setattr(FakeEngine, "start", start)
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(second), pool.submit(dist.init, OPTIONS)]
        assert [result.result(10) for result in results] == [None, None]
    assert len(engines) == 1
    dist.finalize()


@pytest.mark.rule("3.73")
def test_unknown_options_are_one_warning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(Foo="1", Bar="2")
    records = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [r.getMessage() for r in records] == ["options without meaning here are ignored: llm.Foo, llm.Bar"]


def test_fork_child_cannot_use_the_parents_engine(make: Make, engines: list[FakeEngine]) -> None:
    dist, engine = make()
    manager = dist.cache_manager
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for use in (
            dist.links,
            dist.finalize,
            lambda: dist.init(OPTIONS),
            lambda: manager.unregister_cache(1),
        ):
            try:
                use()
                said.append("nothing")
            except RuntimeError as exc:
                said.append("fork" if "fork" in str(exc) and not isinstance(exc, LLMException) else repr(exc))
        own = LLMDataDist(LLMRole.MIX, 5)
        own.init(OPTIONS)
        said.append(str(len(own.links())))
        own.finalize()
        os.write(writer, ",".join(said).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as out:
        assert out.read() == "fork,fork,fork,fork,1"
    assert dist.links()
    assert engine.calls == [("start",)]


@pytest.mark.rule("6.100")
def test_kv_cache_manager_names_the_other(make: Make) -> None:
    dist, _ = make()
    with pytest.raises(ParamInvalidError, match="use cache_manager"):
        _ = dist.kv_cache_manager


# ---- links -------------------------------------------------------------------------------------------


@pytest.mark.rule("1.35", "4.6", "4.8")
def test_link_hands_over_targets_and_keeps_order(make: Make) -> None:
    dist, engine = make()
    engine.link_codes = {3: ALREADY, 4: FAILED}
    clusters = [cluster(4), cluster(2), cluster(3), cluster(5)]
    assert dist.link_clusters(clusters, np.int32(500)) == (ALREADY, [FAILED, OK, ALREADY, OK])  # type: ignore[arg-type]
    address = ("10.0.0.1", 26000)
    assert engine.calls[-1] == ("link", [(4, address), (2, address), (3, address), (5, address)], 500)
    assert dist.link_clusters((cluster(2),)) == (OK, [OK])
    assert engine.calls[-1] == ("link", [(2, address)], 3000)


@pytest.mark.rule("4.13", "4.38")
def test_empty_lists(make: Make) -> None:
    dist, engine = make()
    assert dist.link_clusters([]) == (BAD, [])
    assert dist.unlink_clusters([]) == (BAD, [])
    assert engine.calls == [("start",)]


@pytest.mark.rule("4.17")
@pytest.mark.parametrize("count", [0, 2])
def test_not_exactly_one_remote_address_is_that_clusters_code(
    count: int, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    dist, engine = make()
    clusters = [cluster(2), cluster(3, remote=count), cluster(4)]
    assert dist.link_clusters(clusters) == (BAD, [OK, BAD, OK])
    assert [target[0] for target in engine.calls[-1][1]] == [2, 4]
    said = f"cluster 3 has {count} remote addresses; append_remote_ip_info exactly one"
    assert dist.link_error(3) == said
    assert [r.getMessage() for r in caplog.records if r.name == "llm_datadist.link"] == [
        f"not linked: {said}"
    ]
    assert dist.link_clusters([cluster(3)]) == (OK, [OK])
    assert dist.link_error(3) is None


def test_no_engine_call_when_no_cluster_can_be_dialled(make: Make) -> None:
    dist, engine = make()
    assert dist.link_clusters([cluster(3, remote=0)]) == (BAD, [BAD])
    assert engine.calls == [("start",)]


def test_link_error_comes_from_the_engine(make: Make) -> None:
    dist, engine = make()
    engine.link_errors = {3: "refused"}
    assert (dist.link_error(3), dist.link_error(2)) == ("refused", None)


@pytest.mark.rule("4.18")
def test_local_address_is_needed_without_local_comm_res(make: Make) -> None:
    dist, engine = make()
    with pytest.raises(ParamInvalidError, match=r"clusters\[1\] \(cluster 3\) .*append_local_ip_info"):
        dist.link_clusters([cluster(2), cluster(3, local=0)])
    assert engine.calls == [("start",)]
    assert dist.unlink_clusters([cluster(3, local=0, remote=0)]) == (OK, [OK])
    dist.finalize()
    dist, _ = make(LocalCommRes="")
    assert dist.link_clusters([cluster(3, local=0)]) == (OK, [OK])


@pytest.mark.rule("1.35", "4.38")
def test_unlink_hands_over_ids(make: Make) -> None:
    dist, engine = make()
    engine.link_codes = {2: LLMStatusCode.LLM_UNLINK_FAILED}
    clusters = [cluster(2), cluster(3)]
    assert dist.unlink_clusters(clusters) == (
        LLMStatusCode.LLM_UNLINK_FAILED,
        [LLMStatusCode.LLM_UNLINK_FAILED, OK],
    )
    assert engine.calls[-1] == ("unlink", [2, 3], 3000, False)
    dist.unlink_clusters(clusters, timeout=10, force=True)
    assert engine.calls[-1] == ("unlink", [2, 3], 10, True)


@pytest.mark.rule("1.23", "1.36")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((cluster(), 1), TypeError, "clusters must be list or tuple, not LLMClusterInfo"),
        (("ab", 1), TypeError, "clusters must be list or tuple, not str"),
        (([cluster(), 2], 1), TypeError, r"clusters\[1\] must be LLMClusterInfo, not int"),
        (([cluster(None)], 1), ParamInvalidError, r"clusters\[0\] has no remote_cluster_id"),
        (([cluster()], 0), ParamInvalidError, "timeout is 0 ms"),
        (([cluster()], -1), ParamInvalidError, "timeout is -1 ms"),
        (([cluster()], 2**31), ValueError, "timeout is 2147483648"),
        (([cluster()], 1.5), TypeError, "timeout must be an int, not float"),
        (([cluster()], True), TypeError, "timeout must be an int, not bool"),
        (([cluster()], None), TypeError, "timeout must be an int, not NoneType"),
    ],
)
@pytest.mark.parametrize("method", ["link_clusters", "unlink_clusters"])
def test_bad_arguments_raise_and_reach_no_engine(
    method: str, arguments: tuple[Any, ...], error: type[Exception], text: str, make: Make
) -> None:
    dist, engine = make()
    with pytest.raises(error, match=text) as caught:
        getattr(dist, method)(*arguments)
    assert type(caught.value) is error
    assert engine.calls == [("start",)]


def test_force_must_be_bool(make: Make) -> None:
    dist, _ = make()
    with pytest.raises(TypeError, match="force must be bool, not int"):
        dist.unlink_clusters([cluster()], 5, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "error"), [("1", TypeError), (True, TypeError), (-1, ValueError), (2**64, ValueError)]
)
def test_ids_of_check_link_status_and_link_error(bad: Any, error: type[Exception], make: Make) -> None:
    dist, engine = make()
    for method in (dist.check_link_status, dist.link_error):
        with pytest.raises(error, match="remote_cluster_id"):
            method(bad)
    assert engine.calls == [("start",)]


def test_check_link_status_and_links_delegate(make: Make) -> None:
    dist, engine = make()
    with pytest.raises(NotLinkedError, match="no link to cluster 3"):
        dist.check_link_status(3)
    assert engine.calls[-1] == ("check_link", 3)
    assert [link.cluster_id for link in dist.links()] == [2]
    assert dist.listen_address is None
