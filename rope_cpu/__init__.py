"""Rotary position embeddings for NumPy and ONNX on the CPU: exact, fast, in every variant."""

from typing import TYPE_CHECKING

from rope_cpu import positions
from rope_cpu.caches.batch import Batch
from rope_cpu.caches.kv_cache import KVCache
from rope_cpu.caches.rms_norm import RMSNorm
from rope_cpu.checkpoints.attention_layer import AttentionLayer, AttentionWeights, attention_layer
from rope_cpu.functional import convert_weight, sinusoidal
from rope_cpu.kernels.threads import get_num_threads, set_num_threads
from rope_cpu.launch.attention import attention
from rope_cpu.rotation.apply import apply_rotary
from rope_cpu.rotation.embedding import RotaryEmbedding
from rope_cpu.rotation.plan import RotaryPlan
from rope_cpu.warmup import warmup

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
