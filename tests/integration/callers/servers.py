"""Many clusters in one process, for caller 4: ``ID:PORT`` lines start them, each answered with its port."""

from __future__ import annotations

import sys

from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from tests.integration.callers import memory


def main() -> None:
    started: list[LLMDataDist] = []
    for line in sys.stdin:
        cluster_id, port = line.split(":")
        config = LLMConfig()
        config.enable_cache_manager = True
        config.allow_multiple_instances = True
        config.listen_ip_info = f"127.0.0.1:{int(port)}"
        started.append(LLMDataDist(LLMRole.PROMPT, int(cluster_id)))
        started[-1].init(config.generate_options())
        address = started[-1].listen_address
        assert address is not None
        memory.say(str(address[1]))
    for datadist in started:
        datadist.finalize()
    memory.say("closed")


if __name__ == "__main__":
    main()
