"""Classes of diffusers against their own cos and sin, and their own rotation of vectors."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from functools import cache, partial

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.models import reader
from rope_cpu.models.vision import CLASSES as KNOWN
from rope_cpu.models.vision import REFUSED_CLASSES as REFUSED

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # of packages that diffusers imports
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")
    import diffusers_halves as half_split
    import diffusers_models as models
    import diffusers_rotations as adjacent
    from diffusers.models.attention_processor import MochiAttnProcessor2_0
pytestmark = pytest.mark.peers

LIKE_FLUX = (
    *("FluxTransformer2DModel", "FluxControlNetModel", "ChromaTransformer2DModel"),
    *("LongCatImageTransformer2DModel", "OvisImageTransformer2DModel"),
    *("BriaTransformer2DModel", "BriaFiboTransformer2DModel"),
)
LIKE_WAN = (
    *("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"),
    *("SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"),
)
z_image = partial(adjacent.of_complex_table, processor="ZSingleStreamAttnProcessor")
fibo2 = partial(adjacent.of_complex_table, processor="BriaFibo2AttnProcessor")

# From a class to the function that has it rotate.
CLASSES = {
    **dict.fromkeys(LIKE_FLUX, adjacent.of_ids),
    "Krea2Transformer2DModel": partial(adjacent.of_ids, module="rotary_emb"),
    "Flux2Transformer2DModel": partial(adjacent.of_ids, axes=4),
    "Flux3Transformer2DModel": partial(adjacent.of_ids, axes=4),
    "QwenImageTransformer2DModel": adjacent.qwen,
    "QwenImageControlNetModel": adjacent.qwen,
    "QwenImage21Transformer2DModel": adjacent.qwen21,
    "NucleusMoEImageTransformer2DModel": partial(adjacent.qwen, apply="_apply_rotary_emb_nucleus"),
    "HiDreamImageTransformer2DModel": adjacent.hidream,
    "HunyuanImageTransformer2DModel": adjacent.hunyuan_image,
    "HunyuanVideoTransformer3DModel": adjacent.of_video,
    "HunyuanVideo15Transformer3DModel": adjacent.of_video,
    "HunyuanVideoFramepackTransformer3DModel": adjacent.framepack,
    "MotifVideoTransformer3DModel": adjacent.of_video,
    "ZImageTransformer2DModel": z_image,
    "BriaFibo2Transformer2DModel": fibo2,
    "Lumina2Transformer2DModel": adjacent.lumina2,
    "JoyImageEditTransformer3DModel": adjacent.joy,
    "JoyImageEditPlusTransformer3DModel": adjacent.joy_plus,
    "PRXTransformer2DModel": adjacent.prx,
    "HeliosTransformer3DModel": adjacent.helios,
    "Kandinsky5Transformer3DModel": adjacent.kandinsky5,
    "Kandinsky6Transformer3DModel": adjacent.kandinsky6,
    "Kandinsky6SRTransformer3DModel": adjacent.kandinsky6,
    **dict.fromkeys(LIKE_WAN, adjacent.wan),
    "AnyFlowTransformer3DModel": adjacent.anyflow,
    "AnyFlowFARTransformer3DModel": adjacent.anyflow_far,
    "SanaVideoTransformer3DModel": adjacent.sana_video,
    "WanAnimate2Transformer3DModel": adjacent.wan_animate2,
    "SanaWMTransformer3DModel": adjacent.sana_wm,
    "CogVideoXTransformer3DModel": adjacent.cogvideox,
    "ConsisIDTransformer3DModel": adjacent.cogvideox,
    "EasyAnimateTransformer3DModel": adjacent.easyanimate,
    "HunyuanDiT2DModel": adjacent.hunyuan_dit,
    "HunyuanDiT2DControlNetModel": adjacent.hunyuan_dit,
    # 4 rows and 8 columns of the 256 that CogView 4 spreads over the image.
    "CogView4Transformer2DModel": partial(half_split.of_image_halves, scale=(64, 32)),
    "GlmImageTransformer2DModel": partial(half_split.of_image_halves, scale=(1, 1)),
    "AllegroTransformer3DModel": half_split.allegro,
    "CosmosTransformer3DModel": half_split.cosmos,
    "CosmosControlNetModel": half_split.cosmos,
    "MiniMaxH3Transformer3DModel": half_split.minimax_h3,
    "AceStepTransformer1DModel": half_split.ace_step,
    "LongCatAudioDiTTransformer": half_split.longcat_audio,
    "MiniMaxMusic3Transformer1DModel": half_split.minimax_music,
    "StableAudioDiTModel": half_split.stable_audio,
    "StableAudio3DiTModel": half_split.stable_audio3,
    "OmniGenTransformer2DModel": half_split.omnigen,
    "Ideogram4Transformer2DModel": half_split.ideogram4,
    "Cosmos3OmniTransformer": half_split.cosmos3,
    "LTXVideoTransformer3DModel": half_split.ltx,
    "LTX2VideoTransformer3DModel": half_split.ltx2,
    "SanaWMLTX2RefinerTransformer3DModel": half_split.ltx2,
}

FACTORS = np.linspace(1.0, 3.0, 48)
LONGROPE = {
    "type": "su",
    "short_factor": FACTORS.tolist(),
    "long_factor": (4 * FACTORS).tolist(),
}

# Values that a class cannot be made without, or that switch its rotation on.
VALUES = {
    "HiDreamImageTransformer2DModel": {
        "axes_dims_rope": (64, 32, 32),
        "patch_size": 2,
        "caption_channels": [8, 8],
        "llama_layers": [0, 1],
        "max_resolution": (16, 16),
    },
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "out_channels": 4, "patch_size": 2},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2},
    "HunyuanDiT2DControlNetModel": {"in_channels": 4, "patch_size": 2},
    "CogVideoXTransformer3DModel": {"use_rotary_positional_embeddings": True},
    "ConsisIDTransformer3DModel": {"use_rotary_positional_embeddings": True},
    "OmniGenTransformer2DModel": {"rope_scaling": LONGROPE},
}

# Other values of the keys that the rotation depends on: each must be read.
OTHERS = {
    "BriaFiboTransformer2DModel": {"axes_dims_rope": [32, 48, 48], "rope_theta": 500},
    "Krea2Transformer2DModel": {"axes_dims_rope": (16, 56, 56), "rope_theta": 500.0},
    "Flux3Transformer2DModel": {"axes_dims_rope": (16, 16, 48, 48), "rope_theta": 500},
    "ZImageTransformer2DModel": {"axes_dims": [16, 56, 56], "rope_theta": 500.0},
    "BriaFibo2Transformer2DModel": {"axes_dims": [16, 56, 56], "rope_theta": 500.0},
    "Lumina2Transformer2DModel": {"axes_dim_rope": (16, 40, 40)},
    "QwenImage21Transformer2DModel": {"axes_dims_rope": (32, 48, 48)},
    "NucleusMoEImageTransformer2DModel": {"axes_dims_rope": (32, 48, 48)},
    "MotifVideoTransformer3DModel": {"rope_axes_dim": (32, 48, 48), "rope_theta": 500.0},
    "JoyImageEditTransformer3DModel": {"rope_dim_list": [32, 48, 48], "theta": 500},
    "JoyImageEditPlusTransformer3DModel": {"rope_dim_list": [32, 48, 48], "theta": 500},
    "PRXTransformer2DModel": {"axes_dim": [24, 40], "theta": 500},
    "HeliosTransformer3DModel": {"rope_dim": (32, 48, 48), "rope_theta": 500.0},
    "Kandinsky5Transformer3DModel": {"axes_dims": (32, 16, 16)},
    "Kandinsky6Transformer3DModel": {"axes_dims": (64, 32, 32), "scale_factor": (2.0, 3.0, 1.0)},
    "Kandinsky6SRTransformer3DModel": {"axes_dims": (32, 16, 16), "scale_factor": (2.0, 3.0, 1.0)},
    "AnyFlowTransformer3DModel": {"attention_head_dim": 64},
    "AnyFlowFARTransformer3DModel": {"attention_head_dim": 64},
    "SanaVideoTransformer3DModel": {"attention_head_dim": 64},
    "SanaWMTransformer3DModel": {"linear_head_dim": 56, "hidden_size": 1120},
    "EasyAnimateTransformer3DModel": {"attention_head_dim": 128},
    "HunyuanDiT2DModel": {"attention_head_dim": 64, "hidden_size": 1024},
    "CogView4Transformer2DModel": {"attention_head_dim": 64},
    "GlmImageTransformer2DModel": {"attention_head_dim": 64},
    "AllegroTransformer3DModel": {"interpolation_scale_t": 1.5, "interpolation_scale_w": 3.0},
    "CosmosTransformer3DModel": {"rope_scale": (1.0, 3.0, 2.0), "attention_head_dim": 96},
    "CosmosControlNetModel": {"rope_scale": (1.0, 3.0, 2.0)},
    "MiniMaxH3Transformer3DModel": {"rope_freq_dim": 10, "rope_theta": 500.0},
    "AceStepTransformer1DModel": {"head_dim": 64, "rope_theta": 500.0},
    "LongCatAudioDiTTransformer": {"dit_dim": 1536, "dit_heads": 12},
    "MiniMaxMusic3Transformer1DModel": {"rotary_dim": 48},
    "StableAudioDiTModel": {"attention_head_dim": 128},
    "StableAudio3DiTModel": {"embed_dim": 1536, "num_heads": 12},
    "OmniGenTransformer2DModel": {"rope_base": 500, "max_position_embeddings": 8192},
    "Ideogram4Transformer2DModel": {"mrope_section": (24, 30, 10), "rope_theta": 500},
    "Cosmos3OmniTransformer": {"rope_axes_dim": [40, 14, 10], "rope_theta": 500.0},
    "SanaWMLTX2RefinerTransformer3DModel": {"attention_head_dim": 64, "rope_theta": 500.0},
}
CASES = [(name, {}) for name in CLASSES] + list(OTHERS.items())


@cache
def made(case):
    """Return a model and what its own code makes of positions."""
    name, others = CASES[case]
    instance = models.model(name, **VALUES.get(name, {}), **others)
    return instance, CLASSES[name](instance)


def table_bound(ids, inv_freq, factor):
    """Return what rounding to float32 moves cos and sin by, (tokens, heads, pairs).

    In halves of a unit in the last place of a frequency f = theta^-e, a class rounds the exponent
    (e·ln theta = |ln f|), the power (2), its inverse, a factor on it, a position that is no whole
    number (3), and the angle; then cos and sin, by a whole unit at most; then the attention factor
    and its product, if it is not 1.
    """
    frequency = np.abs(inv_freq)
    logarithm = np.abs(np.log(frequency, where=frequency > 0, out=np.zeros_like(frequency)))
    reach = np.maximum(np.abs(ids.reshape(len(ids), -1)), 1.0)
    angle = np.tensordot(reach, frequency * (logarithm + 8), axes=1)
    return factor * (angle + (2 if factor == 1 else 4)) * 2.0**-24


def agrees(rope, own, rng):
    """Assert that a rotation has a class's own cos and sin, and rotates as its attention does."""
    bound = table_bound(own.ids, rope.spec.inv_freq[0], rope.attention_factor)
    for ours, theirs in zip(rope.cos_sin(own.ids, np.float64), (own.cos, own.sin), strict=True):
        error = np.abs(ours - theirs.double().numpy())
        assert (error.reshape(len(error), -1, error.shape[-1]) <= bound).all()
    heads = bound.shape[1] if bound.shape[1] > 1 else 2
    x = rng.normal(size=(1, len(own.ids), heads, rope.head_dim)).astype(np.float32)
    theirs = own.rotate(torch.from_numpy(x)).numpy()
    ours = rope.rotate(x, own.ids)
    # Both elements of a pair, times cos and sin: two products, their sum and its rounding.
    atol = 2 * np.abs(x).max() * (bound.max() + 4 * 2.0**-24 + own.epsilon)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    assert np.abs(ours - x).max() > 0.1, "nothing was rotated: the comparison proves nothing"


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: CASES[case][0])
def test_cos_sin_and_rotation_are_the_classes_own(case, rng):
    instance, own = made(case)
    rope = RotaryEmbedding.from_config(models.file_of(instance))
    agrees(rope.at_length(int(own.ids.max()) + 1) if rope.spec.needs_length else rope, own, rng)


# The rules of classes without a default width of a head.
WITHOUT_DEFAULTS = (
    *(adjacent.wan, adjacent.anyflow, adjacent.anyflow_far),
    *(adjacent.sana_video, adjacent.wan_animate2),
)

# Classes that are refused without some key, for which the table has no default.
INCOMPLETE = {
    *("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
    *("HiDreamImageTransformer2DModel", "OmniGenTransformer2DModel"),
    *("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel"),
    "SanaWMLTX2RefinerTransformer3DModel",
    *(name for name, rule in CLASSES.items() if rule in WITHOUT_DEFAULTS),
}


@pytest.mark.parametrize("case", range(len(CLASSES)), ids=lambda case: CASES[case][0])
def test_a_missing_key_has_the_value_of_the_class(case):
    instance, _ = made(case)
    name = CASES[case][0]
    if name in INCOMPLETE:
        with pytest.raises((TypeError, ValueError), match=r"is None|is missing|is False"):
            reader.read({"_class_name": name}).spec()
        return
    ours = reader.read({"_class_name": name}).spec()
    assert ours == reader.read(models.file_of(instance)).spec()


def test_omnigen_beyond_its_original_length(rng):
    instance, _ = made([name for name, _ in CASES].index("OmniGenTransformer2DModel"))
    own = half_split.omnigen(instance, first=5000)
    rope = RotaryEmbedding.from_config(models.file_of(instance))
    agrees(rope.at_length(5000 + len(own.ids)), own, rng)


def test_every_known_class_is_compared():
    """All but WanModel, the name of Wan's class in the model's own repository."""
    assert set(CLASSES) == set(KNOWN) - {"WanModel"}


# Classes in files that name a rotation, which rotate nothing themselves.
UNROTATED = {"QwenImageMultiControlNetModel", "RFD4ProteinaTransformer"}


def rotating_classes():
    """Return the names of the transformers and ControlNets whose files name a rotary function."""
    for package in ("diffusers.models.transformers", "diffusers.models.controlnets"):
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            module = importlib.import_module(info.name)
            for name, cls in vars(module).items():
                is_own = inspect.isclass(cls) and cls.__module__ == info.name
                if not is_own or not issubclass(cls, diffusers.ConfigMixin):
                    continue
                if any(word in inspect.getsource(module) for word in ("rotary", "rope", "RoPE")):
                    yield name


def test_every_class_that_rotates_is_known_or_refused():
    known = set(KNOWN) - {"WanModel"} | set(REFUSED)
    assert set(rotating_classes()) == known | UNROTATED


def test_ernie_image_is_refused_because_it_is_no_rotation(rng):
    instance = models.model("ErnieImageTransformer2DModel")
    with pytest.raises(ValueError, match="no rotation"):
        reader.read(models.file_of(instance))
    ids = torch.from_numpy(models.some_ids(3))[None].float()
    angles = instance.pos_embed(ids)
    processor = models.module_of(instance).ErnieImageSingleStreamAttnProcessor
    x = torch.from_numpy(rng.normal(size=(1, ids.shape[1], 2, angles.shape[-1])))
    rotated = models.nested(processor, "apply_rotary_emb")(x, angles.double())
    assert not torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-2), (
        "norms are kept: it is a rotation after all"
    )


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_mochi_rotates_by_its_weights_as_its_refusal_says(rng):
    instance = models.model("MochiTransformer3DModel")
    with pytest.raises(ValueError, match="from_inv_freq, with interleaved=True"):
        reader.read(models.file_of(instance))
    weights = rng.normal(size=instance.pos_frequencies.shape).astype(np.float32)
    rope = RotaryEmbedding.from_inv_freq(weights, interleaved=True)
    ids = instance.rope._get_positions(3, 4, 5, dtype=torch.float32)
    cos, sin = instance.rope(torch.from_numpy(weights), 3, 4, 5, dtype=torch.float32)
    apply = models.nested(MochiAttnProcessor2_0, "apply_rotary_emb")
    own = models.Own(ids.double().numpy(), cos, sin, lambda x: apply(x, cos, sin))
    agrees(rope, own, rng)


@pytest.mark.parametrize("name", REFUSED)
def test_other_classes_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^`_class_name` is '{name}': it"):
        reader.read({"_class_name": name})
