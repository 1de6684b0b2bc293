"""The tables of docs/recipes.md on other libraries: what they rotate against our call beside it.

A row of a library that is not installed is skipped.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rope_cpu

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # those of imported libraries
]

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
PART = PAGE.split("# Moving from another library")[1]
TOKENS = np.arange(3, 27)
GRID = [4, 6]  # the same 24 tokens in rows and columns, for rotations of two axes

Names = dict[str, Any]


def of_mlx(rope: Any, x: Any, names: Names) -> Any:
    return rope(import_module("mlx.core").array(x.numpy()), offset=3)


def of_equinox(rope: Any, x: Any, names: Names) -> Any:
    vmap = import_module("jax").vmap
    return vmap(vmap(rope))(np.pad(x, [(0, 0), (0, 0), (3, 0), (0, 0)]))[:, :, 3:]


def of_gemma(rope: Any, x: Any, names: Names) -> Any:
    return rope(x.numpy().swapaxes(1, 2), TOKENS[None]).swapaxes(1, 2)


def of_keras(rope: Any, x: Any, names: Names) -> Any:
    return np.asarray(rope(x.numpy().swapaxes(1, 2), start_index=3)).swapaxes(1, 2)


def of_penzai(rope: Any, x: Any, names: Names) -> Any:
    wrap, asarray = names["pz"].nx.wrap, import_module("jax.numpy").asarray
    axes = ("batch", "heads", "seq", "head_dim")
    turned = rope(wrap(asarray(x.numpy()), *axes), ids=wrap(asarray(TOKENS), "seq"))
    return turned.unwrap(*axes)


def of_rotary_embedding_torch(rope: Any, x: Any, names: Names) -> Any:
    if not hasattr(rope, "rotate_queries_or_keys"):  # the angles of a grid
        return names["apply_rotary_emb"](rope, x.unflatten(2, GRID)).flatten(2, 3)
    return rope.rotate_queries_or_keys(x, offset=3)


def of_x_transformers(rope: Any, x: Any, names: Names) -> Any:
    return names["apply_rotary_pos_emb"](x, rope(torch.from_numpy(TOKENS))[0])


def of_litgpt(tables: Any, x: Any, names: Names) -> Any:
    cos, sin = (table[None, TOKENS] for table in tables)
    width = cos.shape[-1]
    rotated = names["apply_rope"](x[..., :width], cos, sin)
    return torch.cat([rotated, x[..., width:]], -1)


def of_megatron(rope: Any, x: Any, names: Names) -> Any:
    found = rope.get_emb(len(TOKENS), 3)
    freqs, scale = found if isinstance(found, tuple) else (found, 1.0)
    rotated = names["utils"]._apply_rotary_pos_emb_bshd(
        x.permute(2, 0, 1, 3), freqs, rope.rotary_interleaved, mscale=scale
    )
    return rotated.permute(1, 2, 0, 3)


def of_fms(rope: Any, x: Any, names: Names) -> Any:
    x = x.transpose(1, 2)
    ids = torch.from_numpy(TOKENS).repeat(2, 1)
    return rope.adjusted_qk(x, x, ids)[0].transpose(1, 2)


def of_mistral(freqs: Any, x: Any, names: Names) -> Any:
    freqs = freqs[TOKENS] if freqs.ndim == 2 else freqs.flatten(0, 1)
    rows = [names["apply_rotary_emb"](row, row, freqs)[0] for row in x.transpose(1, 2)]
    return torch.stack(rows).transpose(1, 2)


def of_moshi(rope: Any, x: Any, names: Names) -> Any:
    return rope(x, x, torch.tensor([3, 3]))[0]


def of_curated(rope: Any, x: Any, names: Names) -> Any:
    ids = torch.from_numpy(TOKENS).repeat(2, 1)
    return rope(query=x, key=x, positions=ids)[0]


def of_timm(rope: Any, x: Any, names: Names) -> Any:
    return names["apply_rot_embed_cat"](x, rope.get_embed(GRID), half=rope.rotate_half)


def of_meta(freqs: Any, x: Any, names: Names) -> Any:
    x = x.transpose(1, 2)
    return names["apply_rotary_emb"](x, x, freqs[TOKENS])[0].transpose(1, 2)


MEGATRON = "megatron.core.models.common.embeddings."
GEMMA = "gemma/gm/math/_positional_embeddings.py"  # gemma.gm.math itself imports TensorFlow

# Of each library: its modules by the names that its cells have for them ("": their own names are
# used), and how it rotates a tensor (batch, heads, tokens, head_dim).
LIBRARIES: dict[str, tuple[dict[str, str], Callable[[Any, Any, Names], Any]]] = {
    "MLX": ({"mx": "mlx.core", "nn": "mlx.nn"}, of_mlx),
    "mlx-lm": ({"": "mlx_lm.models.rope_utils"}, of_mlx),
    "Equinox": ({"eqx": "equinox"}, of_equinox),
    "Gemma": ({"": GEMMA}, of_gemma),
    "KerasHub": ({"": "keras_hub.src.models.llama.llama_rotary_embedding"}, of_keras),
    "penzai": ({"pz": "penzai.pz"}, of_penzai),
    "rotary-embedding-torch": (
        {"": "rotary_embedding_torch.rotary_embedding_torch"},
        of_rotary_embedding_torch,
    ),
    "x-transformers": ({"": "x_transformers.x_transformers"}, of_x_transformers),
    "LitGPT": ({"": "litgpt.model"}, of_litgpt),
    "Megatron core": (
        {"": MEGATRON + "yarn_rotary_pos_embedding", "utils": MEGATRON + "rope_utils"},
        of_megatron,
    ),
    "IBM FMS": ({"": "fms.modules.positions"}, of_fms),
    "mistral-inference": ({"": "mistral_inference.rope"}, of_mistral),
    "moshi": ({"": "moshi.modules.rope"}, of_moshi),
    "curated-transformers": ({"": "curated_transformers.layers"}, of_curated),
    "timm": ({"": "timm.layers"}, of_timm),
    "Meta": ({"": "llama_models.llama3.model"}, of_meta),
}


def imported(name: str) -> Any:
    """Return a module of a library, or what has the names of a file of it; skip without it."""
    if not name.endswith(".py"):
        return pytest.importorskip(name)
    package = pytest.importorskip(name.partition("/")[0])
    return SimpleNamespace(**runpy.run_path(str(Path(package.__path__[0]).parent / name)))


def names_of(library: str) -> Names:
    """Return the names that the cells of a library use."""
    modules = {alias: imported(name) for alias, name in LIBRARIES[library][0].items()}
    return {**vars(modules.get("", SimpleNamespace())), **modules}


def our_names() -> Names:
    """Return the names that our cells use."""
    names: Names = {"np": np, "rope_cpu": rope_cpu}
    block = re.search(r"```python\n(.*?)```", PART, re.DOTALL)
    assert block is not None
    exec(block[1], names)
    return names


def rows() -> list[tuple[str, str, str]]:
    """Return the library, its code and ours of each row."""
    return re.findall(r"^\| ([^|]*) \| (`.*?`) \| (`.*?) \|", PART, re.MULTILINE)


ROWS = rows()


def test_every_library_has_a_row() -> None:
    assert {library for library, _, _ in ROWS} == set(LIBRARIES)


@pytest.mark.parametrize(("library", "theirs", "ours"), ROWS, ids=[" ".join(row) for row in ROWS])
def test_rows(
    library: str,
    theirs: str,
    ours: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("NO_TORCH_COMPILE", "1")
    names = {**our_names(), **names_of(library)}
    # Megatron core computes where this says.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    x = rng.standard_normal((2, 3, 24, 64), dtype=np.float32)
    rope = eval(theirs.strip("`"), names)
    rotated = np.asarray(LIBRARIES[library][1](rope, torch.from_numpy(x), names))
    rope, *ids = (eval(code, our_names()) for code in re.findall("`(.*?)`", ours))
    expected = rope.rotate(x, *(ids or [TOKENS]), layout="bhsd")
    # Angles of at most 30 radians in float32, and values of at most 5.
    np.testing.assert_allclose(rotated, expected, rtol=0, atol=1e-5)
