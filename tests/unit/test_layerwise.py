"""Transfer configs: every property is checked, also when it is set later."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig


@pytest.mark.rule("5.89", "5.96", "5.97")
def test_transfer_config() -> None:
    given = [16, 32]
    config = TransferConfig(2**64 - 1, given, range(1, 2), 3)
    given.append(48)
    assert (config.dst_cluster_id, config.dst_addrs) == (2**64 - 1, [16, 32])
    assert (config.src_layer_range, config.src_batch_index) == (range(1, 2), 3)
    config.src_layer_range = None
    config.dst_addrs = (48,)
    assert (config.src_layer_range, config.dst_addrs) == (None, [48])
    assert "<1 addresses>" in repr(config)
    assert (TransferConfig(1, []).src_layer_range, TransferConfig(1, []).src_batch_index) == (None, 0)


@pytest.mark.rule("5.96")
def test_transfer_with_cache_key_config() -> None:
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(2), range(2, 4))
    assert (config.cache_key, config.src_layer_range, config.dst_layer_range) == (
        BlocksCacheKey(1),
        range(2),
        range(2, 4),
    )
    assert config.src_batch_index == 0
    config.cache_key = CacheKeyByIdAndIndex(1, 2)
    assert config.cache_key == CacheKeyByIdAndIndex(1, 2)
    assert "CacheKeyByIdAndIndex(cluster_id=1" in repr(config)


PLAIN: dict[str, Any] = {"dst_cluster_id": 1, "dst_addrs": [1], "src_layer_range": None, "src_batch_index": 0}
KEYED: dict[str, Any] = {
    "cache_key": BlocksCacheKey(1),
    "src_layer_range": range(2),
    "dst_layer_range": range(2),
}


@pytest.mark.parametrize(
    ("kind", "right", "name", "value", "error"),
    [
        (TransferConfig, PLAIN, "dst_cluster_id", -1, ValueError),
        (TransferConfig, PLAIN, "dst_cluster_id", "1", TypeError),
        (TransferConfig, PLAIN, "dst_addrs", 1, TypeError),
        (TransferConfig, PLAIN, "dst_addrs", [1.0], TypeError),
        (TransferConfig, PLAIN, "dst_addrs", [2**64], ValueError),
        (TransferConfig, PLAIN, "src_layer_range", [0, 1], TypeError),
        (TransferConfig, PLAIN, "src_batch_index", -1, ValueError),
        (TransferConfig, PLAIN, "src_batch_index", True, TypeError),
        (TransferWithCacheKeyConfig, KEYED, "cache_key", CacheKey(1, 2), TypeError),
        (TransferWithCacheKeyConfig, KEYED, "src_layer_range", None, TypeError),
        (TransferWithCacheKeyConfig, KEYED, "dst_layer_range", (0, 1), TypeError),
        (TransferWithCacheKeyConfig, KEYED, "src_batch_index", 2**32, ValueError),
    ],
)
@pytest.mark.rule("5.93", "5.95", "5.96")
def test_refused_by_constructor_and_setter(
    kind: Any, right: dict[str, Any], name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"^{name}"):
        kind(**{**right, name: value})
    config = kind(**right)
    before = getattr(config, name)
    with pytest.raises(error, match=f"^{name}"):
        setattr(config, name, value)
    assert getattr(config, name) == before


def test_synchronizer_is_abstract() -> None:
    with pytest.raises(TypeError, match="synchronize_layer"):
        LayerSynchronizer()  # type: ignore[abstract]
