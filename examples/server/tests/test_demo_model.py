"""The demo model: its size, its configuration, and how well it predicts a text it has not seen."""

from __future__ import annotations

import numpy as np
import pytest
from rope_server.__main__ import DEMO

from rope_cpu import RotaryEmbedding

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Psalm 113 of the King James Version, one of the chapters held out by train_demo.py.
HELD_OUT = """\
Praise ye the LORD. Praise, O ye servants of the LORD, praise the name of the LORD.
Blessed be the name of the LORD from this time forth and for evermore.
From the rising of the sun unto the going down of the same the LORD's name is to be praised.
The LORD is high above all nations, and his glory above the heavens.
Who is like unto the LORD our God, who dwelleth on high,
Who humbleth himself to behold the things that are in heaven, and in the earth!
He raiseth up the poor out of the dust, and lifteth the needy out of the dunghill;
That he may set him with princes, even with the princes of his people.
He maketh the barren woman to keep house, and to be a joyful mother of children. Praise ye the LORD.
"""
PERPLEXITY = 13.23  # as measured; rounding to bfloat16 changes it by 0.02


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def test_folder_is_small():
    assert sum(file.stat().st_size for file in DEMO.iterdir() if file.is_file()) < 3e6


def test_model_has_the_parameters_that_the_readme_states(model):
    stated = f"{model.num_parameters():,} parameters"
    assert stated in (DEMO / "README.md").read_text()
    assert model.config.num_attention_heads == 2 * model.config.num_key_value_heads


def test_perplexity_of_a_held_out_chapter(model, tokenizer):
    tokens = tokenizer(HELD_OUT, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    assert loss.exp().item() < 1.01 * PERPLEXITY


def test_text_survives_the_tokenizer(tokenizer):
    text = HELD_OUT + "Ünïcödé 123 \N{OK HAND SIGN}\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chat_is_one_line_a_message(tokenizer):
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "A\nB\n"


def test_generation_ends_at_the_end_of_a_document(model, tokenizer):
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0


def test_rope_cpu_reads_the_configuration():
    rope = RotaryEmbedding.from_config(DEMO)
    expected = [10000.0 ** (-pair / 16) for pair in range(16)]
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-15)
