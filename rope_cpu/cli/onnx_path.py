"""The exported rotation under onnxruntime, for `rope-cpu verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from rope_cpu import export
from rope_cpu.export import runtime
from rope_cpu.rotary import RotaryEmbedding

Array = NDArray[Any]


class OnnxPath:
    """A rotary exported for one target and dtype, in a session."""

    def __init__(
        self, rope: RotaryEmbedding, dtype: np.dtype[Any], target: str, layout: str, heads: tuple[int, int], tokens: int
    ) -> None:
        """Export it with tables for `tokens` positions; ValueError where the target cannot express it."""
        num_heads, num_kv_heads = heads
        model = export.export_rope(
            rope,
            target=target,
            dtype=dtype,
            layout=layout,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            max_positions=tokens,
        )
        self.session = runtime.session(model)

    def prepare(self, q: Array, k: Array, ids: Array) -> tuple[Callable[[], object], Array, Array]:
        """Bind inputs and outputs to memory once, as a server does; calls then copy nothing."""
        out = np.empty_like(q), np.empty_like(k)
        binding = self.session.io_binding()
        given = {"q": q, "k": k, "position_ids": ids[None].astype(np.int64)}
        values = {name: _value(x) for name, x in given.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name, result in zip(("q_rot", "k_rot"), out, strict=True):
            binding.bind_output(name, "cpu", 0, _onnx_type(result), result.shape, result.ctypes.data)

        def call(_held: object = (given, values, out)) -> None:  # onnxruntime 1.29 keeps nothing that is bound to it
            self.session.run_with_iobinding(binding)

        return call, *out


def _value(x: Array) -> Any:
    # onnxruntime's Python knows no bfloat16 arrays: their bits, and a type.
    bits = x.view(np.uint16) if x.dtype.itemsize == 2 else x
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _onnx_type(x))


def _onnx_type(x: Array) -> int:
    return int(helper.np_dtype_to_tensor_dtype(x.dtype))
