"""The table of attention facts against the source of transformers' attention classes."""

import ast
import contextlib
import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rope_cpu.configs.attention_facts import FACTS  # noqa: E402
from rope_cpu.configs.model_types import model_facts  # noqa: E402
from rope_cpu.configs.reader import read  # noqa: E402

pytestmark = pytest.mark.peers

MODELS = Path(transformers.__file__).parent / "models"
NORM = re.compile(
    r"self\.(?:q_norm|query_norm|qk_norm|q_layernorm|query_layernorm)\b\(|self\.(?:q_norm|qk_norm)\(\n",
)


def attention_classes():
    """Return model type → (source of the class, of its forward) of text attention that rotates."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        source, folder = path.read_text(), path.parent.name
        for node in ast.parse(source).body:
            text = ast.get_source_segment(source, node) if isinstance(node, ast.ClassDef) else ""
            if "Attention" not in getattr(node, "name", "") or not re.search(
                r"apply_\w*rotary", text
            ):
                continue
            methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
            annotations = [
                ast.unparse(a.annotation) for a in methods["__init__"].args.args if a.annotation
            ]
            name = next(
                (a.strip("'\"") for a in annotations if re.fullmatch(r"['\"]?\w+Config['\"]?", a)),
                None,
            )
            if name is None or "forward" not in methods:
                continue
            module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
            model_type = getattr(getattr(module, name, None), "model_type", "")
            if model_facts(model_type) is not None and model_facts(model_type).part is None:
                found[model_type] = text, ast.get_source_segment(source, methods["forward"])
    return found


CLASSES = attention_classes()


def test_enough_classes_are_found():
    assert len(CLASSES) > 60


@pytest.mark.parametrize("model_type", sorted(CLASSES))
def test_facts_of_attention(model_type):
    text, forward = CLASSES[model_type]
    norm, rotation = NORM.search(forward), re.search(r"apply_\w*rotary\w*\(", forward)
    when = None if norm is None else "before" if norm.start() < rotation.start() else "after"
    recorded = next(
        (w for w in ("before", "after") if model_type in FACTS[f"qk_norm_{w}_rotation"]), None
    )
    assert recorded == when
    assert (model_type in FACTS["sinks"]) == bool(re.search(r"self\.\w*sinks?\b", text))
    always = re.search(r"self\.is_causal = False$|self\.is_causal = False  # ", text, flags=re.M)
    assert (model_type in FACTS["bidirectional"]) == bool(always)
    assert (model_type in FACTS["causal_if_decoder"]) == (
        "self.is_causal = config.is_decoder" in text
    )
    ones = re.findall(r"self\.scaling = 1\.0$", text, flags=re.M)
    assert (FACTS["scale"].get(model_type) == 1.0) == bool(ones)


def norm_of_queries(text):
    """Return the class of the norm, and its arguments up to the end of the line."""
    names = r"q_norm|query_norm|qk_norm|q_layernorm|query_layernorm"
    return re.search(rf"self\.(?:{names}) = ([\w.]+)\(\s*([^\n]*)", text).groups()


NORMED = [name for name in sorted(CLASSES) if NORM.search(CLASSES[name][1])]


def class_source(name, text):
    """Return the source of a class in the module that has an attention class."""
    for path in MODELS.glob("*/modeling_*.py"):
        source = path.read_text()
        if text in source:
            found = [
                ast.get_source_segment(source, node)
                for node in ast.parse(source).body
                if getattr(node, "name", "") == name
            ]
            return found[0] if found else ""
    raise AssertionError(f"no module has the attention class of {name}")


def test_enough_norms_are_found():
    assert len(NORMED) > 50


@pytest.mark.parametrize("model_type", NORMED)
def test_form_of_the_norms(model_type):
    """An RMS norm over each head with weights, unless the table says otherwise."""
    text, _ = CLASSES[model_type]
    name, arguments = norm_of_queries(text)
    body = class_source(name, text)
    subtracts_mean = "LayerNorm" in name
    whole = r"num_attention_heads \* self\.head_dim|^config\.hidden_size,"
    over_projection = bool(re.search(whole, arguments))
    has_weight = "self.weight" in body and "with_scale=False" not in arguments
    is_rms = bool(re.search(r"pow\(2\)\.mean\(-1|square\(\)\.mean\(-1", body))
    other = subtracts_mean or not is_rms or (over_projection and "if" in arguments)
    assert (model_type in FACTS["qk_norm_other"]) == other
    assert (model_type in FACTS["qk_norm_over_projection"]) == (over_projection and not other)
    assert (model_type in FACTS["qk_norm_unweighted"]) == (not has_weight and not other)
    plus_one = re.search(r"1(?:\.0)? \+ self\.weight|self\.weight(?:\.float\(\))? \+ 1", body)
    assert (model_type in FACTS["qk_norm_offset"]) == bool(plus_one)


# Their classes compute a value: one per kind of layer, or the usual scale, head_dim^-½.
WORKED_OUT = {"dots3_note_text", "hyperclovax", "modernbert", "modernbert-decoder", "step3p5"}


def silent_configs():
    """Return model type → (its class's config, facts of a silent file) of rotated models."""
    found = {}
    for model_type, made in transformers.models.auto.configuration_auto.CONFIG_MAPPING.items():
        facts = model_facts(model_type)
        if facts is not None and facts.part is None and model_type not in WORKED_OUT:
            with contextlib.suppress(ValueError):  # it has no rotation where it is silent
                found[model_type] = made(), read({"model_type": model_type}).attention
    return found


SILENT = silent_configs()


def test_enough_silent_configs_are_found():
    assert len(SILENT) > 180


@pytest.mark.parametrize("model_type", SILENT)
def test_attention_of_a_silent_config_is_that_of_its_class(model_type):
    made, attention = SILENT[model_type]
    made.allow_global_per_layer_attribute_access = True
    scalar = getattr(made, "query_pre_attn_scalar", None)
    scale = getattr(made, "attention_multiplier", scalar and scalar**-0.5)
    assert attention.window == (getattr(made, "sliding_window", None) or None)
    assert attention.chunk == getattr(made, "attention_chunk_size", None)
    assert attention.softcap == getattr(made, "attn_logit_softcapping", None)
    assert attention.scale == FACTS["scale"].get(model_type, scale)
    assert attention.shared_layers == getattr(made, "num_kv_shared_layers", 0)


NORM_MODULES = [name for name in NORMED if name in SILENT]


@pytest.mark.parametrize("model_type", NORM_MODULES)
def test_epsilon_of_a_silent_config_is_that_of_its_class(model_type):
    made, attention = SILENT[model_type]
    keys = [key for key in FACTS["norm_epsilon_keys"] if hasattr(made, key)]
    assert attention.norm_epsilon == (getattr(made, keys[0]) if keys else None)
