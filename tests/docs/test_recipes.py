"""The recipes of docs/recipes.md against a second implementation of their formulas."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from oracle import expm, inv_freq

import rope_cpu
from rope_cpu import positions

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def blocks():
    """Return {number of the recipe: its code, block after block}."""
    found = {}
    for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^#|\Z)", PAGE.read_text(), re.M | re.S):
        found[int(number)] = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    return found


RECIPES = blocks()


def run(number, **given):
    """Execute one recipe on the given names and return all names."""
    names = {"np": np, "rope_cpu": rope_cpu, **given}
    exec(compile(RECIPES[number], f"{PAGE.name}, recipe {number}", "exec"), names)
    return names


@pytest.fixture
def vectors(rng):
    """Random arrays of a shape, each new."""
    return lambda *shape: rng.normal(size=shape)


def close(ours, exact, atol=1e-12):
    """Compare; by default for vectors of normal draws and angles of up to 100 radians.

    Each of two products of position and frequency errs by 7e-15 there, and no draw reaches 20.
    """
    np.testing.assert_allclose(ours, exact, rtol=0, atol=atol)


def adjacent(x, angles):
    """Rotate adjacent pairs, as complex numbers."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def halves(x, angles):
    """x·cos + rotate_half(x)·sin with cos and sin of both halves."""
    full = np.concatenate([angles, angles], -1)
    a, b = np.split(x, 2, -1)
    return x * np.cos(full) + np.concatenate([-b, a], -1) * np.sin(full)


def halves_by_axis(x, ids):
    """Rotate halves within the block of each axis; ids: (..., axes)."""
    blocks = np.split(x, ids.shape[-1], -1)
    angles = [ids[..., [axis]] * inv_freq(block.shape[-1]) for axis, block in enumerate(blocks)]
    return np.concatenate([halves(*pair) for pair in zip(blocks, angles, strict=True)], -1)


def angles_by_axis(ids, widths, base=1e4):
    """Return the angles (tokens, 1, pairs) of pairs that the axes own in turn."""
    angles = [ids[:, [axis]] * inv_freq(width, base) for axis, width in enumerate(widths)]
    return np.concatenate(angles, -1)[:, None]


def test_every_recipe_is_tested():
    tested = {int(n) for name in globals() for n in re.findall(r"^test_(\d+)_", name)}
    assert tested == set(RECIPES) == set(range(1, 22))


@pytest.mark.parametrize("head_dim", [4, 16, 64])
def test_01_block_matrix(head_dim, vectors):
    xy = np.array([[3.0, 5.0], [-2.0, 0.5]])
    theta = 0.7
    x = vectors(1, 2, 3, head_dim)
    x4 = vectors(1, 2, 1, 4)
    names = run(1, head_dim=head_dim, x=x, x4=x4, xy=xy, theta=theta)
    close(names["y"], adjacent(x, angles_by_axis(xy, (head_dim // 2, head_dim // 2))))
    for token, place in enumerate(xy):
        (cx, cy), (sx, sy) = np.cos(place * theta), np.sin(place * theta)
        four = np.array([[cx, -sx, 0, 0], [sx, cx, 0, 0], [0, 0, cy, -sy], [0, 0, sy, cy]])
        close(names["y4"][0, token, 0], four @ x4[0, token, 0])


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_02_scores_depend_on_differences(axes, vectors, rng):
    q = vectors(1, 5, 2, 24)
    k = vectors(1, 6, 2, 24)
    at_q = rng.integers(-20, 20, size=(5, axes))
    at_k = rng.integers(-20, 20, size=(6, axes))
    one = (lambda ids: ids[:, 0]) if axes == 1 else (lambda ids: ids)
    names = run(2, head_dim=24, axes=axes, q=q, k=k, at_q=one(at_q), at_k=one(at_k))
    for i in range(5):
        for j in range(6):
            rotated = halves_by_axis(k[0, j], (at_k[j] - at_q[i])[None])
            exact = np.einsum("hd,hd->h", q[0, i], rotated)
            close(names["scores"][0, :, i, j], exact)


def test_03_positions_come_back():
    # An angle errs by 2^-24 or so, and the slowest pair rotates by 1.3e-4 radians a position.
    close(run(3)["found"], np.arange(1000), atol=2.0**-23 / 10000 ** (-31 / 32))


def test_04_more_dimensions(vectors, rng):
    x3 = vectors(1, 24, 2, 48)
    x4 = vectors(1, 9, 2, 64)
    at4 = rng.uniform(-9, 9, size=(9, 4))
    names = run(4, frames=2, rows=3, columns=4, x3=x3, x4=x4, at4=at4)
    grid = np.array([(t, r, c) for t in range(2) for r in range(3) for c in range(4)])
    close(names["y3"], halves_by_axis(x3, grid[:, None]))
    close(names["y4"], halves_by_axis(x4, at4[:, None]))
    assert names["unequal"].spec.blocks == (16, 56, 56)


@pytest.fixture
def general(vectors, rng):
    """What recipe 5 is given: commuting generators, vectors, weights, and a rotation matrix."""
    basis = np.linalg.qr(vectors(6, 6))[0]
    plain = np.zeros((2, 6, 6))
    even = np.arange(0, 6, 2)
    plain[:, even + 1, even] = vectors(2, 3)
    b1, b2 = basis @ (plain - plain.transpose(0, 2, 1)) @ basis.T
    o = np.linalg.qr(vectors(6, 6))[0]
    o[:, 0] *= np.linalg.det(o)
    given = {"x": vectors(1, 4, 2, 6), "xy": vectors(4, 2), "hidden": vectors(1, 4, 1, 9)}
    weights = {"w_q": vectors(6, 9), "w_k": vectors(6, 9)}
    return given | weights | {"b1": b1, "b2": b2, "o": o, "n": np.array([0, 1, 2, 5])}


def test_05_general_solution(general):
    names = run(5, **general)
    x = general["x"]
    o = general["o"]
    hidden = general["hidden"][0, :, 0]
    rounding = 64 * 6 * 2.0**-52  # of matrices of 6, for each radian
    exponents = [a * general["b1"] + b * general["b2"] for a, b in general["xy"]]
    operators = [expm(exponent) for exponent in exponents]
    errors = [rounding * (1 + np.linalg.norm(exponent, 2)) for exponent in exponents]
    for token, (operator, error) in enumerate(zip(operators, errors, strict=True)):
        size = np.linalg.norm(x[0, token], axis=-1).max()
        close(names["y"][0, token], x[0, token] @ operator.T, atol=error * size)
        n = general["n"][token]
        power = np.linalg.matrix_power(o, n)
        close(names["y_n"][0, token], x[0, token] @ power.T, atol=rounding * (1 + np.pi * n) * size)
    queries, keys = (
        np.array([operator @ w @ h for operator, h in zip(operators, hidden, strict=True)])
        for w in (general["w_q"], general["w_k"])
    )
    size = np.linalg.norm(queries, axis=1).max() * np.linalg.norm(keys, axis=1).max()
    close(names["scores"][0], queries @ keys.T, atol=2 * max(errors) * size)


def test_05_general_solution_refuses_reflections(general):
    general["o"][:, 0] *= -1
    with pytest.raises(TypeError, match="`generators` has dtype complex128"):
        run(5, **general)


def test_06_half_split_2d(vectors, rng):
    head_dim = 32
    ids = rng.integers(0, 50, size=(2, 7, 2))
    q = vectors(2, 4, 7, head_dim)
    k = vectors(2, 2, 7, head_dim)
    names = run(6, head_dim=head_dim, q=q, k=k, position_ids=ids)
    close(names["q_rot"], halves_by_axis(q, ids[:, None]))
    close(names["k_rot"], halves_by_axis(k, ids[:, None]))


def test_07_pairings(vectors):
    hidden = vectors(1, 6, 10)
    w_q = vectors(3 * 16, 10)
    w_k = vectors(3 * 16, 10)
    names = run(7, head_dim=16, num_heads=3, hidden=hidden, w_q=w_q, w_k=w_k)
    scores = [np.einsum("bqhd,bkhd->bhqk", *names[name]) for name in ("before", "after")]
    angles = np.arange(6)[:, None, None] * inv_freq(16)
    exact = [adjacent((hidden @ w.T).reshape(1, 6, 3, 16), angles) for w in (w_q, w_k)]
    close(scores[0], np.einsum("bqhd,bkhd->bhqk", *exact), atol=1e-10)
    close(scores[1], scores[0], atol=1e-10)
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    close(names["after"][0], names["before"][0][..., order])


def test_08_rope_vit(vectors):
    side = 5
    head_dim = 24
    x = vectors(2, 25, 3, 24)
    freqs = vectors(2, 3, 12)
    names = run(8, side=side, head_dim=head_dim, x=x, freqs=freqs)
    token = np.arange(side * side)
    across = token % side
    down = token // side
    own = np.array([100.0 ** (-4 * i / head_dim) for i in range(head_dim // 4)])
    angles = np.concatenate([across[:, None] * own, down[:, None] * own], -1)
    close(names["y_axial"], adjacent(x, angles[:, None]))
    close(
        names["y_mixed"],
        adjacent(x, across[:, None, None] * freqs[0] + down[:, None, None] * freqs[1]),
    )


def sinusoids(count, dim):
    angles = np.array(
        [[pos / 10000 ** (2 * (j // 2) / dim) for j in range(dim)] for pos in range(count)]
    )
    return np.where(np.arange(dim) % 2, np.cos(angles), np.sin(angles))


def test_09_sinusoidal(vectors):
    before = vectors(2, 7, 16).astype(np.float32)
    embeddings = before.copy()
    names = run(9, num_positions=20, dim=16, embeddings=embeddings, offset=3)
    close(names["table"], sinusoids(20, 16), atol=2**-24)
    close(embeddings, before + sinusoids(20, 16)[3:10], atol=2**-21)


def test_10_row_vectors(vectors):
    planes = 4
    x = vectors(1, 6, 1, 8)
    names = run(10, planes=planes, x=x)
    # A row vector times the transposed matrix; the frequencies begin at k = 1.
    omega = 10000 ** (-np.arange(1, planes + 1) / planes)
    close(names["y"], adjacent(x, np.arange(6)[:, None, None] * omega))


def test_11_meta_llama(vectors):
    xq = vectors(2, 9, 4, 32)
    xk = vectors(2, 9, 1, 32)
    names = run(11, head_dim=32, xq=xq, xk=xk, start_pos=100)
    angles = np.outer(np.arange(100, 109), inv_freq(32))[:, None]
    close(names["xq_out"], adjacent(xq, angles))
    close(names["xk_out"], adjacent(xk, angles))


def test_12_hugging_face_llama(vectors):
    q = vectors(2, 4, 9, 32)
    k = vectors(2, 2, 9, 32)
    angles = np.outer(np.arange(200), inv_freq(32))
    table = np.concatenate([angles, angles], -1)
    ids = np.arange(100, 109)
    given = {"cos": np.cos(table), "sin": np.sin(table), "position_ids": ids}
    names = run(12, head_dim=32, q=q, k=k, offset=100, **given)
    close(names["q_embed"], halves(q, angles[ids]))
    close(names["k_embed"], halves(k, angles[ids]))
    close(names["q_table"], halves(q, angles[ids]))


def test_13_roformer(vectors):
    q, k, v = (vectors(2, 3, 6, 16) for _ in range(3))
    ids = np.arange(7, 13)
    names = run(13, head_dim=16, q=q, k=k, v=v, past_key_values_length=7, position_ids=ids)
    angles = np.outer(ids, inv_freq(16))
    for name, x in (("q_rot", q), ("k_rot", k), ("v_rot", v)):
        close(names[name], adjacent(x, angles))
    # The table is float32, as the model's.
    close(names["q_table"], names["q_rot"], atol=2 * 2**-24 * np.abs(q).max())


def test_14_roformer_table():
    names = run(14, num_positions=30, dim=12)
    angles = np.array([[pos / np.power(10000, 2 * i / 12) for i in range(6)] for pos in range(30)])
    close(names["table"], np.concatenate([np.sin(angles), np.cos(angles)], -1), atol=2**-24)


def test_15_paddle(vectors, rng):
    xy = rng.integers(0, 30, size=(8, 2))
    x = vectors(1, 8, 2, 16)
    names = run(15, head_dim=16, x=x, xy=xy)
    close(names["y"], adjacent(x, angles_by_axis(xy, (8, 8))))


def test_16_derivation(vectors, rng):
    q = vectors(1, 5, 1, 16)
    k = vectors(1, 5, 1, 16)
    m, n = rng.integers(0, 1000, size=(2, 5))
    names = run(16, head_dim=16, q=q, k=k, m=m, n=n)
    close(names["frequencies"], inv_freq(16))
    close(np.linalg.norm(names["q_rot"], axis=-1), np.linalg.norm(q, axis=-1))
    exact = (q * adjacent(k, ((n - m)[:, None] * inv_freq(16))[:, None])).sum(-1)
    close((names["q_rot"] * names["k_rot"]).sum(-1), exact, atol=1e-11)


def test_17_qwen_vl(vectors):
    tokens = np.array([[5, 6, *[90] * 6, 7, *[91] * 8, 8]])
    q = vectors(1, 18, 2, 128)
    k = vectors(1, 18, 1, 128)
    grids = {"image_grid_thw": [[1, 4, 6]], "video_grid_thw": [[4, 2, 4]]}
    names = run(17, input_ids=tokens, image_token=90, video_token=91, q=q, k=k, **grids)
    image = [(2, 2 + r, 2 + c) for r in range(2) for c in range(3)]
    video = [(6 + t, 6, 6 + c) for t in range(4) for c in range(2)]
    ids = np.array([(0,) * 3, (1,) * 3, *image, (5,) * 3, *video, (10,) * 3])
    assert names["ids"].tolist() == [ids.tolist()]
    assert names["offset"].tolist() == [11 - 18]
    axis = np.repeat([0, 1, 2], [16, 24, 24])
    angles = ids[:, axis] * inv_freq(128, 1e6)
    close(names["q_rot"], halves(q, angles[:, None]))
    close(names["k_rot"], halves(k, angles[:, None]))
    assert names["patch_ids"].shape == (24, 2)
    assert names["patch_ids"][:5].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    x = vectors(1, 24, 2, 80)
    rotated = names["tower"].rotate(x, names["patch_ids"])
    close(rotated, halves(x, angles_by_axis(names["patch_ids"], (40, 40))))


def test_18_class_tokens():
    names = run(18, rows=3, columns=4, registers=4, window_size=2)
    centres = [(2 * (r + 0.5) / 3 - 1, 2 * (c + 0.5) / 4 - 1) for r in range(3) for c in range(4)]
    close(names["dinov3_ids"], np.array([(0, 0)] * 5 + centres))
    patches = [[r, c] for r in range(1, 4) for c in range(1, 5)]
    assert names["llama4_ids"].tolist() == [*patches, [0, 0]]
    assert names["sam3_window_ids"].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert names["sam3_global_ids"].tolist() == [[r / 2, c / 2] for r in range(3) for c in range(4)]


def test_19_video_models(vectors):
    names = run(19, frames=2, rows=3, columns=5)
    assert names["qwen_image_ids"][:, 1].tolist() == [r for r in (-2, -1, 0) for _ in range(5)]
    assert names["qwen_image_ids"][:, 2].tolist() == [-3, -2, -1, 0, 1] * 3
    for name, widths, base in [
        ("wan", (44, 42, 42), 1e4),
        ("flux", (16, 56, 56), 1e4),
        ("hunyuan_video", (16, 56, 56), 256.0),
        ("cogvideox", (16, 24, 24), 1e4),
    ]:
        ids = names["video_ids"]
        x = vectors(1, len(ids), 2, sum(widths))
        close(names[name].rotate(x, ids), adjacent(x, angles_by_axis(ids, widths, base)))
    assert np.array_equal(names["video_ids"], positions.grid((2, 3, 5)))


def test_20_configurations():
    text = {"hidden_size": 1536, "num_attention_heads": 12, "rope_theta": 1e6}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
    tower = {"embed_dim": 1280, "num_heads": 16}
    whole = {"model_type": "qwen2_vl", **text, "vision_config": tower}
    wan = {"_class_name": "WanTransformer3DModel", "attention_head_dim": 128}
    names = run(20, config=whole, diffusers_config=wan)
    axis = np.repeat([0, 1, 2], [16, 24, 24])
    close(names["language"].inv_freq, (axis == np.arange(3)[:, None]) * inv_freq(128, 1e6))
    close(names["tower"].inv_freq, np.kron(np.eye(2), inv_freq(40)))
    assert (names["tower"].head_dim, names["tower"].interleaved) == (80, False)
    # The angles at the three unit vectors.
    close(names["video_model"].inv_freq, angles_by_axis(np.eye(3), (44, 42, 42))[:, 0])


def test_21_attention_stays_float32_and_agrees_with_a_cache(rng):
    hidden = rng.standard_normal((17, 32)).astype(np.float32) / 8
    names = run(21, rng=rng, hidden=hidden, heads=4, head_dim=16)
    assert {names[name].dtype for name in ("weight", "q_rot", "weights", "y")} == {np.dtype("f4")}
    q, k, v = (x.astype(np.float64) for x in (names["q"], names["k"], names["v"]))
    omega = inv_freq(16)

    def turned(x, position):
        pairs = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * position * omega)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    for head in range(4):
        query = turned(q[-1, head], 16)
        weights = np.exp([query @ turned(k[j, head], j) / 4 for j in range(17)])
        expected = weights @ v[:, head] / weights.sum()
        # A few roundings of float32 scores, which are below 16, and of their weights.
        for y in (names["y"], names["y_cached"]):
            assert np.abs(y[head] - expected).max() <= 4e-6 * np.abs(v).max()
