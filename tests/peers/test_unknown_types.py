"""Model types of transformers that rotate and stand in no table: the script of `.ci/run`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from unknown_types import main, unknown_types

CONFIG = """
class {name}Config(PreTrainedConfig):
    model_type = "{model_type}"
    {key}: int = 3
"""
MODEL = """
class {name}RotaryEmbedding(nn.Module):
    def __init__(self, config: {name}Config):
        super().__init__()


class {name}Model(nn.Module):
    def __init__(self, config: {whole}Config):
        self.rotary_emb = {name}RotaryEmbedding(config)
"""


def write(package: Path, folder: str, config: str, model: str = "") -> None:
    target = package / "models" / folder
    target.mkdir(parents=True)
    (target / f"configuration_{folder}.py").write_text(config)
    if model:
        (target / f"modeling_{folder}.py").write_text(model)


@pytest.mark.peers
def test_every_type_with_a_rotary_module_stands_in_a_table() -> None:
    package = Path(pytest.importorskip("transformers").__file__).parent
    assert unknown_types(package / "models") == {}


def test_types_in_no_table_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    brand = CONFIG.format(name="Brand", model_type="brand_new", key="hidden_size")
    write(tmp_path, "brand", brand, MODEL.format(name="Brand", whole="Brand"))
    keys = CONFIG.format(name="Keys", model_type="keys_only", key="rope_parameters")
    write(tmp_path, "keys", keys)
    llama = CONFIG.format(name="Llama", model_type="llama", key="rope_parameters")
    whole = CONFIG.format(name="Whole", model_type="whole_of_llama", key="hidden_size")
    write(tmp_path, "llama", llama + whole, MODEL.format(name="Llama", whole="Whole"))
    added = CONFIG.format(name="Added", model_type="added", key="hidden_size")
    write(tmp_path, "added", added, "class AddedModel(nn.Module):\n    pass\n")
    assert main(str(tmp_path)) == 1
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert named == ["brand_new", "keys_only"]


def test_a_folder_without_transformers_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no folder `models`"):
        main(str(tmp_path))
