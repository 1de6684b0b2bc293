"""The table of attention facts against the source of transformers' attention classes."""

import ast
import contextlib
import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

from rope_cpu.models.attention import FACTS, attention_of  # noqa: E402
from rope_cpu.models.model_types import model_facts  # noqa: E402
from rope_cpu.models.reader import read  # noqa: E402

pytestmark = pytest.mark.peers

TYPES = FACTS["types"]

MODELS = Path(transformers.__file__).parent / "models"
NORM = re.compile(
    r"self\.(?:q_norm|query_norm|qk_norm|q_layernorm|query_layernorm)\b\(|self\.(?:q_norm|qk_norm)\(\n",
)


def types_with(fact):
    """Return the model types that have a fact."""
    return {name for name, row in TYPES.items() if fact in row}


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
    row = TYPES.get(model_type, {})
    norm, rotation = NORM.search(forward), re.search(r"apply_\w*rotary\w*\(", forward)
    when = None if norm is None else "before" if norm.start() < rotation.start() else "after"
    assert row.get("qk_norm") == when
    assert row.get("has_sinks", False) == bool(re.search(r"self\.\w*sinks?\b", text))
    always = re.search(r"self\.is_causal = False$|self\.is_causal = False  # ", text, flags=re.M)
    if_decoder = "causal" in row.get("if", {})
    assert row.get("causal", True) == (not always and not if_decoder)
    assert if_decoder == ("self.is_causal = config.is_decoder" in text)
    ones = re.findall(r"self\.scaling = 1\.0$|softplus\(self\.scaling\)", text, flags=re.M)
    assert (row.get("scale") == 1.0) == bool(ones)
    assert ("query_weights" in row) == ("softplus(self.scaling)" in text)


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
    row = TYPES[model_type]
    text = row.get("norm_other", "")
    assert (text == "over the whole projection") == (over_projection and not other)
    assert bool(text) == (other or over_projection)
    assert ("norm_weighted" in row) == (not has_weight and not other)
    plus_one = re.search(r"1(?:\.0)? \+ self\.weight|self\.weight(?:\.float\(\))? \+ 1", body)
    assert ("norm_offset" in row) == bool(plus_one)


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
    assert attention.scale == TYPES.get(model_type, {}).get("scale", scale)
    assert attention.shared_layers == getattr(made, "num_kv_shared_layers", 0)


NORM_MODULES = [name for name in NORMED if name in SILENT]


@pytest.mark.parametrize("model_type", NORM_MODULES)
def test_epsilon_of_a_silent_config_is_that_of_its_class(model_type):
    made, attention = SILENT[model_type]
    keys = [key for key in FACTS["norm_epsilon_keys"] if hasattr(made, key)]
    assert attention.norm_epsilon == (getattr(made, keys[0]) if keys else None)


def sources():
    """Return the source of each model's modules by folder."""
    folders = {path.parent for path in MODELS.glob("*/modeling_*.py")}
    return {
        folder.name: "".join(path.read_text() for path in sorted(folder.glob("modeling_*.py")))
        for folder in folders
    }


# Masks with blocks that are not those of a rotated causal model: git has no rotation, and the
# mask of unlimited_ocr is a row of "other".
OTHER_BLOCKS = {"git", "unlimited_ocr"}
# Model types that are another folder's model with a mask of blocks.
SAME_BLOCKS = {"colpali": "paligemma", "shieldgemma2": "gemma3"}
FOLDERS = {"deepseek_ocr2_encoder": "deepseek_ocr2", "gemma4_text": "gemma4"} | SAME_BLOCKS


def test_models_with_masks_of_blocks_have_bidirectional_tokens():
    masks = re.compile(r"block_sequence_ids[\"\]]*\s*=|block_sequence_ids=")
    found = {name for name, source in sources().items() if masks.search(source)}
    listed = {FOLDERS.get(name, name) for name in types_with("bidirectional_tokens")}
    assert listed == found - OTHER_BLOCKS


TOKENS_IF = {
    name: row["if"]["bidirectional_tokens"]
    for name, row in TYPES.items()
    if "bidirectional_tokens" in row.get("if", {})
}


@pytest.mark.parametrize("name", TOKENS_IF)
def test_the_default_of_a_key_for_bidirectional_tokens_is_that_of_its_class(name):
    key, default, _ = TOKENS_IF[name]
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]()
    assert getattr(config.get_text_config(), key) == default


def bidirectional_tokens(model_type, **keys):
    values = {"model_type": f"{model_type}_text", **keys}
    source = {"model_type": model_type, "text_config": values}
    return attention_of(values["model_type"], values, source).bidirectional_tokens


def test_bidirectional_tokens_of_gemma_follow_the_key():
    for model_type in ("gemma4", "gemma4_unified", "diffusion_gemma"):
        assert bidirectional_tokens(model_type, use_bidirectional_attention="vision")
        assert not bidirectional_tokens(model_type, use_bidirectional_attention="all")
    assert not bidirectional_tokens("gemma4")
    alone = {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}
    assert attention_of("gemma4_text", alone, alone).bidirectional_tokens
    assert bidirectional_tokens("gemma3")
    text = {"model_type": "gemma3_text"}
    older = {"model_type": "gemma3", "num_attention_heads": 4}  # of the language model alone
    for source in (text, older):
        assert attention_of("gemma3_text", text, source).bidirectional_tokens is None


def test_models_whose_queries_are_scaled_by_position():
    scales = {"attn_temperature_tuning": {"llama4_text"}, "compute_attention_scaling": {"beam"}}
    scales["get_llama_4_attn_scale"] = {"ministral3", "mistral4"}
    types = {folder: folder for folder in sources()} | {"llama4": "llama4_text"}
    for name, expected in scales.items():
        found = {types[folder] for folder, source in sources().items() if name in source}
        assert found == expected
    assert types_with("query_scale_key") == {"ministral3", "mistral4", "qwen"}
    assert types_with("unrotated_query_scale") == {"beam", "llama4_text"}


@pytest.mark.parametrize("flag", [True, 4, False, 0])
def test_queries_of_llama4_are_scaled_unless_it_is_switched_off(flag):
    values = {"attn_temperature_tuning": flag}
    attention = attention_of("llama4_text", values)
    assert bool(attention.unrotated_query_scale) == bool(flag)
    assert attention.query_scale is None


@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_the_scale_of_queries_in_a_section_by_layer_type(section):
    values = {section: {"full_attention": {"llama_4_scaling_beta": 0.1}}}
    assert attention_of("llama", values).query_scale
    values = {section: {"llama_4_scaling_beta": 0}}
    assert attention_of("ministral3", values).query_scale is None


def test_default_layers_of_cross_attention_are_those_of_the_class():
    name = "mllama_text_model"
    made = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]()
    kinds = read({"model_type": name}).values["layer_types"]
    layers = [index for index, kind in enumerate(kinds) if kind == "cross_attention"]
    assert layers == made.cross_attention_layers


def class_names():
    """Return (model type, name of a class) from the auto classes of transformers."""
    module = transformers.models.auto.modeling_auto
    tables = [table for name, table in vars(module).items() if re.match("MODEL_.*_NAMES", name)]
    pairs = {(kind, names) for table in tables for kind, names in table.items()}
    split = {(kind, (names,) if isinstance(names, str) else names) for kind, names in pairs}
    return sorted({(kind, name) for kind, names in split for name in names})


def test_classes_of_transformers_are_those_of_their_model_types():
    # The encoder of T5Gemma is no class of the decoder, whose attention is answered.
    for model_type, name in set(class_names()) - {("t5gemma", "T5GemmaEncoderModel")}:
        source = {"model_type": model_type, "architectures": [name]}
        other = attention_of(model_type, {}, source).other
        assert other is None or "architectures" not in other, name


# Classes of published files whose names are not those of their model types.
OWN_CLASSES = [
    ("RefinedWeb", "RWForCausalLM"),
    ("nemotron-nas", "DeciLMForCausalLM"),
    ("phi-msft", "PhiForCausalLM"),
    ("phi-msft", "MixFormerSequentialForCausalLM"),
    ("llava", "LlavaLlamaForCausalLM"),
    ("hf_olmo", "OLMoForCausalLM"),
    ("kimi_k2", "DeepseekV3ForCausalLM"),
    ("neobert", "NeoBERTLMHead"),
    ("qwen", "QWenLMHeadModel"),
    ("minicpmv", "MiniCPMV"),
    ("qwen2", "Qwen2ForProcessRewardModel"),
]


@pytest.mark.parametrize(("model_type", "name"), OWN_CLASSES)
def test_classes_of_published_files_are_those_of_their_model_types(model_type, name):
    source = {"model_type": model_type, "architectures": [name]}
    assert "architectures" not in (attention_of(model_type, {}, source).other or "")


OTHER_CLASSES = {
    "DFlashDraftModel": "qwen3",
    "LlamaBidirectionalModel": "llama",
    "Llama4ForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2",
    "Fast_dLLM_QwenForCausalLM": "qwen2",
    "InternLMXComposr2ForCausalLM": "internlm2",
    "NVEmbedModel": "mistral",
}


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_a_class_of_another_family_decides_nothing(name):
    model_type = OTHER_CLASSES[name]
    source = {"model_type": model_type, "architectures": ["Model", name]}
    for values, whole in (({}, source), (source, {}), (source, {"model_type": "llava"})):
        other = attention_of(model_type, values, whole).other
        assert other.startswith("`architectures` has 'Model'")
        whole_name = {**source, "architectures": name}
        assert name in attention_of(model_type, {}, whole_name).other
    unknown = {"model_type": "unknown", "architectures": [name]}
    assert attention_of(model_type, {}, unknown).other is None


# Files whose weights have other rows than q_proj of transformers, and the type of the rotated part.
PERMUTED = {
    "gradium_phonon_tts": "gradium_phonon_tts",
    "kimi_k25": "kimi_k25_vision",
    "mistral_large4": "pixtral",
    "step3p5_vision": "step3p5_vision",
}


def test_model_types_whose_rows_transformers_permutes_on_loading():
    mapping = get_checkpoint_conversion_mapping
    names = [*transformers.models.auto.configuration_auto.CONFIG_MAPPING]
    operations = {
        name: [type(one).__name__ for row in mapping(name) or () for one in operations_of(row)]
        for name in names
    }
    permuted = {name for name, found in operations.items() if "PermuteForRope" in found}
    assert permuted == set(PERMUTED)
    assert set(PERMUTED.values()) == set(FACTS["interleaved_weights"])


def operations_of(row):
    return getattr(row, "operations", None) or ()
