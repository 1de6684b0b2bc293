"""Files of many rotations, targets and kinds, with feeds, exact results and their error bounds.

The results come from `oracle` and `attention_oracle`, which share no code with the export. Every
step gets the exact past, so that feeds do not depend on results.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import oracle
from attention_oracle import attention, exactly, half_ulp, normed, rotated
from text_configs import LLAMA3_SCALING

from rope_cpu import RotaryEmbedding, export

TARGETS = ("primitive", "onnx", "ort")
KINDS = ("rotation", "rotation by table", "growing cache", "shared cache")
HEADS = 4
KV_HEADS = 2
TABLE_ROWS = 64
LARGEST_POSITION = 131071
EPSILON = 1e-6

# Tokens of the attended sequence, which fill the table of positions and the shared cache.
TOKENS = 32
# (first token of each batch row, number of tokens): a prefill, a chunk of one row, two steps.
# Rows of a shared cache have different lengths.
STEPS = {
    "growing cache": [((0, 0), 13), ((13,), 6), ((19, 19), 1), ((31, 31), 1)],
    "shared cache": [((0, 0), 13), ((13,), 6), ((19, 7), 1), ((31, 12), 1)],
}
CACHE_NAMES = {
    "rope_cpu": ("past_", "present_"),
    "optimum": ("past_key_values.0.", "present.0."),
}

LLAMA31 = RotaryEmbedding(128, rope_theta=5e5, scaling=LLAMA3_SCALING)
LINEAR = {"rope_type": "linear", "factor": 8.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": np.linspace(1.08, 64.0, 48).tolist(),
    "original_max_position_embeddings": 4096,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_YARN = YARN | {"factor": 40.0, "truncate": True, "mscale": 1.0, "mscale_all_dim": 1.0}


def longrope():
    """Return the rotation of Phi-3 beyond its original length."""
    length = LARGEST_POSITION + 1
    rope = RotaryEmbedding(96, scaling=LONGROPE, max_position_embeddings=length)
    return rope.at_length(length)


def latent():
    """Return the rotation of DeepSeek-V3's expanded heads, whose rotated slice comes first."""
    rope = RotaryEmbedding(64, scaling=DEEPSEEK_YARN, interleaved=True)
    return RotaryEmbedding.from_inv_freq(
        rope.inv_freq, head_dim=192, attention_factor=rope.attention_factor, interleaved=True
    )


@dataclass
class Model:
    """A model's rotation, and its attention; has_norms: RMS norms of q and k.

    names: of the files of attention, as an argument of the export.
    """

    rope: RotaryEmbedding
    has_norms: bool = False
    has_sinks: bool = False
    window: int | None = None
    softcap: float | None = None
    names: str = "rope_cpu"


MODELS = {
    "llama3.1": Model(LLAMA31),
    "llama3.1-optimum": Model(LLAMA31, names="optimum"),
    "qwen3": Model(RotaryEmbedding(128, rope_theta=1e6), has_norms=True),
    # The softcap of Gemma 2 is 50; a low one shows where masks are applied before it.
    "gemma2-sliding": Model(RotaryEmbedding(256), window=9, softcap=2.0),
    "gemma3-sliding": Model(RotaryEmbedding(256), has_norms=True, window=9),
    "gemma3-full": Model(RotaryEmbedding(256, rope_theta=1e6, scaling=LINEAR), has_norms=True),
    "glm4.5": Model(RotaryEmbedding(128, rope_theta=1e6, rotary_dim=64)),
    "phi3-longrope": Model(longrope()),
    "gpt-oss": Model(
        RotaryEmbedding(64, rope_theta=150000.0, scaling=YARN), has_sinks=True, window=9
    ),
    "deepseek-v3": Model(latent()),
    "qwen2-vl": Model(RotaryEmbedding.mrope(128, [16, 24, 24], rope_theta=1e6)),
    "flux": Model(RotaryEmbedding.axial(128, 3, axis_dims=[16, 56, 56], interleaved=True)),
}


@dataclass
class File:
    """A model's bytes, feeds, and for each feed the results: {output: (exact, error bound)}."""

    model: bytes
    feeds: list
    expected: list

    def errors(self, results):
        """Return the largest error, and True if all are within the bounds and one rounding."""
        largest = 0.0
        within = True
        for result, expected in zip(results, self.expected, strict=True):
            for name, (exact, bound) in expected.items():
                y = np.asarray(result[name])
                if y.shape != exact.shape or not np.isfinite(y).all():
                    return np.inf, False
                error = np.abs(y.astype(np.float64) - exact)
                largest = max(largest, float(error.max()))
                within = within and bool((error <= bound + half_ulp(exact, "float32")).all())
        return largest, within

    def first_row(self):
        """Return the file with the first batch row of each feed alone."""
        feeds = [{name: x[:1] for name, x in feed.items()} for feed in self.feeds]
        expected = [
            {name: (exact[:1], bound[:1]) for name, (exact, bound) in results.items()}
            for results in self.expected
        ]
        return File(self.model, feeds, expected)


@cache
def make_file(model, target, kind, seed=0):
    """Return the file of a model of `MODELS`."""
    rng = np.random.default_rng(seed)
    if kind in STEPS:
        return _attention_file(MODELS[model], target, kind, rng)
    return _rotation_file(MODELS[model].rope, target, kind == "rotation by table", rng)


def _rotation_file(rope, target, by_table, rng):
    max_positions = TABLE_ROWS if by_table else None
    model = export.export_rope(
        rope,
        target=target,
        layout="bshd",
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        max_positions=max_positions,
    )
    ids = _draw_ids(rope, max_positions or LARGEST_POSITION + 1, rng)
    tensors = {"q": _draw(rng, HEADS, rope.head_dim), "k": _draw(rng, KV_HEADS, rope.head_dim)}
    exact = {f"{name}_rot": rotated(rope, x, ids, "float32") for name, x in tensors.items()}
    tensors["position_ids"] = ids
    feeds = []
    expected = []
    for span in (np.s_[:, :-1], np.s_[:, -1:]):
        feeds.append({name: np.ascontiguousarray(x[span]) for name, x in tensors.items()})
        expected.append({name: (y[span], off[span]) for name, (y, off) in exact.items()})
    return File(model.SerializeToString(), feeds, expected)


def _draw_ids(rope, end, rng):
    """Return position ids (2, TOKENS[, axes]) that increase up to end - 1 on every axis."""
    axes = [rope.axes] if rope.axes > 1 else []
    ids = np.sort(rng.integers(0, end, (2, TOKENS, *axes)), axis=1)
    ids[:, -1] = end - 1
    return ids


def _draw(rng, heads, width):
    return oracle.draw(rng, (2, TOKENS, heads, width), np.float32)


def _attention_file(model, target, kind, rng):
    rope = model.rope
    q, k, v = (_draw(rng, heads, rope.head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    tensors = {"q": q, "k": k, "v": v}
    ids = np.tile(np.arange(TOKENS), (2, 1))
    options = {"window": model.window, "softcap": model.softcap, "scale": rope.head_dim**-0.5}
    exported = {"names": model.names, "layer": 0 if model.names == "optimum" else None}
    if rope.axes > 1:
        ids = tensors["position_ids"] = _draw_ids(rope, TOKENS, rng)
        exported["positions"] = "position_ids"
    if model.has_sinks:
        options["sinks"] = rng.standard_normal(HEADS)
    if model.has_norms:
        weights = [rng.uniform(0.5, 1.5, rope.head_dim).astype(np.float32) for _ in "qk"]
        exported |= {"qk_norm": weights, "norm_epsilon": EPSILON}
        q, k = (
            normed(exactly(x), w, EPSILON, "float32") for x, w in zip((q, k), weights, strict=True)
        )
    onnx_model = export.export_attention(
        rope,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        target=target,
        layout="bshd",
        cache=kind.removesuffix(" cache"),
        max_positions=TOKENS,
        **options,
        **exported,
    )
    result = attention(rope, q, k, v, ids, "float32", **options)
    cached = {"key": rotated(rope, k, ids, "float32"), "value": exactly(v)}
    feeds = []
    expected = []
    for starts, count in STEPS[kind]:
        ends = [start + count for start in starts]
        feed = {name: _spans(x, starts, ends) for name, x in tensors.items()}
        outputs = {"attention": tuple(_spans(x, starts, ends) for x in result)}
        if model.names == "optimum":
            feed["attention_mask"] = _token_mask(starts, count)
        elif kind == "shared cache":
            feed["past_lengths"] = np.array(starts)
        past, present = CACHE_NAMES[model.names]
        buffer = _shared_buffer if kind == "shared cache" else _growing_buffer
        for name, pair in cached.items():
            feed[past + name] = buffer(pair[0], starts).astype(np.float32)
            outputs[present + name] = tuple(buffer(x, ends) for x in pair)
        feeds.append(feed)
        expected.append(outputs)
    return File(onnx_model.SerializeToString(), feeds, expected)


def _token_mask(starts, count):
    """Return ones for the past and the new tokens of each row: (batch, longest past + count)."""
    past = np.arange(max(starts)) < np.array(starts)[:, None]
    return np.pad(past, ((0, 0), (0, count)), constant_values=True).astype(np.int64)


def _spans(x, starts, ends):
    """Return the tokens from start to end of each batch row."""
    rows = zip(x, starts, ends, strict=False)
    return np.stack([row[start:end] for row, start, end in rows])


def _growing_buffer(x, lengths):
    """Return the leading tokens of (batch, seq, heads, width), as (batch, heads, length, width)."""
    return np.ascontiguousarray(x[: len(lengths), : lengths[0]].transpose(0, 2, 1, 3))


def _shared_buffer(x, lengths):
    """Return a buffer of TOKENS tokens, zeros from the length of each row on."""
    held = np.arange(TOKENS) < np.array(lengths)[:, None]
    return np.where(held[..., None, None], x[: len(lengths)], 0).transpose(0, 2, 1, 3)
