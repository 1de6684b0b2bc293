"""Rotary position embeddings for NumPy and ONNX on the CPU: exact, fast, in every variant.

`RotaryEmbedding` rotates q and k, and reads a model's config; its `plan` holds the cos and sin of a
step for all layers. A server keeps keys and values in a `KVCache`, describes the sequences of a
step by a `Batch`, and calls `attention`. `rope_cpu.export` writes the same as ONNX.

>>> import numpy as np, rope_cpu
>>> rope = rope_cpu.RotaryEmbedding(128, rope_theta=500000.0)
>>> q = np.ones((1, 512, 32, 128), np.float32)  # (batch, seq, heads, head_dim)
>>> q_rot, k_rot = rope(q, q[:, :, :8])
"""

from typing import TYPE_CHECKING

from rope_cpu import positions
from rope_cpu.attention_layer import AttentionLayer, AttentionWeights, attention_layer
from rope_cpu.caches.batch import Batch
from rope_cpu.caches.kv_cache import KVCache
from rope_cpu.caches.rms_norm import RMSNorm
from rope_cpu.kernels.threads import get_num_threads, set_num_threads
from rope_cpu.launch.attention import attention
from rope_cpu.rotation.apply import apply_rotary
from rope_cpu.rotation.embedding import RotaryEmbedding
from rope_cpu.rotation.plan import RotaryPlan
from rope_cpu.sinusoidal_table import sinusoidal
from rope_cpu.warmup import warmup
from rope_cpu.weight_pairing import convert_weight

__version__ = "0.1.0"

__all__ = [
    "AttentionLayer",
    "AttentionWeights",
    "Batch",
    "KVCache",
    "RMSNorm",
    "RotaryEmbedding",
    "RotaryPlan",
    "apply_rotary",
    "attention",
    "attention_layer",
    "convert_weight",
    "get_num_threads",
    "positions",
    "set_num_threads",
    "sinusoidal",
    "warmup",
]


if not TYPE_CHECKING:  # type checkers would accept every attribute of a module with `__getattr__`

    def __getattr__(name: str) -> object:
        """Refuse the packages that `import rope_cpu` does not load, with the import that does."""
        text = f"module {__name__!r} has no attribute {name!r}"
        if name == "export":
            text += "; load this package with `from rope_cpu import export`"
        raise AttributeError(text, name=name)
