"""Caller 4: one ``link_clusters`` call for 40 clusters; those that failed are tried again, and only those.

``python -m tests.integration.callers.many_clusters PORT,PORT,…``: the ports of clusters 100, 101, …; two of them
are dead until a line comes in.
"""

from __future__ import annotations

import sys

from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode
from tests.integration.callers import memory

FIRST_ID = 100


def cluster_of(number: int, port: int) -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = FIRST_ID + number
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info("127.0.0.1", port)
    return cluster


def main(ports: list[int]) -> None:
    config = LLMConfig()
    config.enable_cache_manager = True
    datadist = LLMDataDist(LLMRole.DECODER, 1)
    datadist.init(config.generate_options())
    clusters = [cluster_of(number, port) for number, port in enumerate(ports)]
    overall, codes = datadist.link_clusters(clusters, timeout=8000)
    failed = [c for c, code in zip(clusters, codes, strict=True) if code != LLMStatusCode.LLM_SUCCESS]
    assert overall == LLMStatusCode.LLM_LINK_FAILED, (overall, codes)
    assert all(datadist.link_error(c.remote_cluster_id or 0) for c in failed)
    memory.say("failed " + ",".join(str(c.remote_cluster_id) for c in failed))
    sys.stdin.readline()
    overall, codes = datadist.link_clusters(failed, timeout=8000)
    assert (overall, codes) == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS] * len(failed)), codes
    for link in datadist.links():
        datadist.check_link_status(link.cluster_id)
    memory.say(f"linked {len(datadist.links())}")
    overall, codes = datadist.link_clusters(clusters, timeout=8000)
    assert set(codes) == {overall} == {LLMStatusCode.LLM_ALREADY_LINK}, codes
    datadist.finalize()
    memory.say("closed")


if __name__ == "__main__":
    main([int(port) for port in sys.argv[1].split(",")])
