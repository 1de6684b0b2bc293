"""ONNX export: the same rotation as graph operators, validated under onnxruntime.

Needs the extra `onnx`, which asks for onnxruntime 1.29. A saved file may run on an older one,
and in other runtimes: "Runtimes" in docs/onnx.md has the tables.
"""

try:
    import onnx as _onnx  # noqa: F401
    import onnxruntime as _onnxruntime  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"rope_cpu.export needs onnx and onnxruntime, and {error.name!r} is missing: "
        'pip install "rope-cpu[all]"'
    ) from error

from .attention_model import export_attention
from .checkpoint import attention_options, attention_weights
from .files import save
from .foreign_check import check
from .merging import merge
from .rope_model import export_rope
from .validation.report import Report
from .validation.session import bind
from .validation.validate import validate

__all__ = [
    "Report",
    "attention_options",
    "attention_weights",
    "bind",
    "check",
    "export_attention",
    "export_rope",
    "merge",
    "save",
    "validate",
]
