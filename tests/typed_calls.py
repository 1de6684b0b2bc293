"""Calls for `mypy tests/typed_calls.py`, which reports an ignore without a wrong value."""

import numpy as np

import rope_cpu
from rope_cpu import export

rope = rope_cpu.RotaryEmbedding(64, angle_dtype="float32")
q = np.ones((1, 2, 4, 64), np.float32)

rope(q, q, layout="bhsd")
rope.rotate(q, layout="bhds")  # type: ignore[arg-type]
rope.plan([0, 1], layout="BSHD")  # type: ignore[arg-type]
rope.cos_sin([0, 1], "fp32")  # type: ignore[arg-type]
rope_cpu.RotaryEmbedding(64, angle_dtype="bfloat16")  # type: ignore[arg-type]

cache: rope_cpu.KVCache = rope_cpu.KVCache.zeros(1, 16, 4, 64, dtype="int8")
cache = rope_cpu.KVCache.zeros(1, 16, 4, 64, dtype=np.float32, layers=2)  # type: ignore[assignment]
caches: list[str] = rope_cpu.KVCache.zeros(1, 16, 4, 64, dtype="int8")  # type: ignore[assignment]
rope_cpu.KVCache.zeros(1, 16, 4, 64, dtype="bf16")  # type: ignore[call-overload]
rope_cpu.warmup("float32", cache_dtypes=["int8", "bfloat16"])
rope_cpu.warmup("fp16")  # type: ignore[arg-type]
rope_cpu.convert_weight(q, 4, to="half_split")  # type: ignore[arg-type]

export.export_rope(rope, target="ort", layout="bsd", dtype=np.float16)
export.export_rope(rope, target="onnxruntime")  # type: ignore[arg-type]
export.export_attention(rope, num_heads=4, mask="bool", cache="shared")
export.export_attention(rope, num_heads=4, mask="causal")  # type: ignore[arg-type]
export.export_attention(rope, num_heads=4, cache="paged")  # type: ignore[arg-type]
report = export.check("model.onnx", {"full_attention": rope}, positions=4096)
print(report.passed, report.max_abs_error)
export.check("model.onnx", [rope])  # type: ignore[arg-type]
