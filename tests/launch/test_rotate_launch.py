"""Between arrays and kernels: the kernels' order of axes, and dtypes without a kernel."""

import numpy as np

from rope_cpu.array_types import BSHD_VIEWS
from rope_cpu.launch import rotate


def test_layouts_are_seen_as_batch_tokens_heads():
    x = np.zeros((2, 3, 4, 8))
    assert {name: seen(x).shape for name, seen in BSHD_VIEWS.items() if name != "thd"} == {
        "bhsd": (2, 4, 3, 8),
        "sbhd": (3, 2, 4, 8),
    }
    assert BSHD_VIEWS["thd"](x[0]).shape == (1, 3, 4, 8)


def test_the_last_cache_has_a_size():
    assert 2**18 <= rotate.last_level_cache() <= 2**32
