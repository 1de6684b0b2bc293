"""Between arrays and kernels: the kernels' order of axes, and dtypes without a kernel."""

import numpy as np
import oracle
from oracle import draw

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import BSHD_VIEWS
from rope_cpu.launch import arrays, rotate


def test_layouts_are_seen_as_batch_tokens_heads():
    x = np.zeros((2, 3, 4, 8))
    assert {name: seen(x).shape for name, seen in BSHD_VIEWS.items() if name != "thd"} == {
        "bhsd": (2, 4, 3, 8),
        "sbhd": (3, 2, 4, 8),
    }
    assert BSHD_VIEWS["thd"](x[0]).shape == (1, 3, 4, 8)


def test_float16_without_instructions_goes_through_float32(monkeypatch, request, rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(48), head_dim=50)
    q, k = draw(rng, (1, 7, 4, 50), np.float16), draw(rng, (1, 7, 2, 50), np.float16)
    expected = rope(q, k)
    monkeypatch.setattr(arrays, "converts_float16", lambda: False)
    request.addfinalizer(rotate.launcher.cache_clear)
    rotate.launcher.cache_clear()
    assert not rope.plan(np.arange(7))._launch(q.dtype)[0](None, q, k, q, k, 2)
    for result, exact in zip(rope(q, k), expected, strict=True):
        assert result.tobytes() == exact.tobytes()
    assert np.isinf(rope.rotate(np.full_like(q, 60000))).any()  # beyond float16, without a warning


def test_the_last_cache_has_a_size():
    assert 2**18 <= rotate.last_level_cache() <= 2**32
