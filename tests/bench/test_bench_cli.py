"""`rope-cpu bench`: listing, selection, output, errors; no test depends on measured times."""

import json
import re
import sys

import pytest

import rope_cpu
from rope_cpu.bench import cases as table
from rope_cpu.bench.workloads import Workload
from rope_cpu.cli import bench as command
from rope_cpu.cli.bench import select
from rope_cpu.cli.command_line import UsageError

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
FLUX = {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 2}
QWEN2_VL = LLAMA | {
    "model_type": "qwen2_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}


def test_the_table_begins_with_q_and_k_apart(cases):
    first = list(cases.values())[:12]
    shapes = [f"separate-{n}/float32" for n in (1, 32, 128, 512, 2048, 4096)]
    assert [case.name for case in first] == [name + out for name in shapes for out in ("", "/out")]
    for case in first:
        assert case.default
        assert {"ORT operator IO-bound", "ORT RotaryEmbedding-23 IO-bound"} <= set(case.peers)
        assert ("plan, unaligned out" in case.ours) == case.name.endswith("/out")


@pytest.mark.parametrize(("name", "start"), [("plan", 0), ("plan, unaligned out", 16)])
def test_q_and_k_apart_are_contiguous_and_results_aligned(cases, name, start):
    """ONNX takes them as (batch, seq, heads·head_dim)."""
    case = cases["separate-32/float32/out"]
    q, k, out = case.ours[name](case.workload).arguments
    assert (q.shape, k.shape) == ((1, 32, 32, 128), (1, 32, 8, 128))
    assert all(x.flags.c_contiguous for x in (q, k, *out))
    assert [x.ctypes.data % 64 for x in (q, k, *out)] == [16, 16, start, start]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("prefill-128/float32", ["prefill-128/float32"]),
        ("prefill-128/f*16", ["prefill-128/float16"]),
        ("decode-8/float32/o", ["decode-8/float32/out"]),
        ("shift", ["serving-shift/bfloat16", "serving-shift/float32"]),
    ],
)
def test_patterns_select_cases(cases, pattern, names):
    assert [case.name for case in select(list(cases.values()), [pattern])] == names


def test_a_listing_has_names_and_descriptions(bench, cases, capsys):
    assert bench("--list", "prefill-512/*") == 0
    lines = capsys.readouterr().out.splitlines()
    listed = select(list(cases.values()), ["prefill-512/*"])
    assert [(line[0], *line[2:].split(maxsplit=1)) for line in lines] == [
        ("*" if case.default else " ", case.name, case.what) for case in listed
    ]


def test_a_run_prints_and_writes(bench, capsys, tmp_path):
    path = tmp_path / "run.json"
    words = ("decode-?/float32", "--no-peers", "--json", str(path))
    assert bench(*words) == 0
    out = capsys.readouterr().out
    assert "shapes of Llama 3.1 8B: 32 + 8 heads of 128" in out
    run = json.loads(path.read_text())
    assert [case["name"] for case in run["cases"]] == ["decode-1/float32", "decode-8/float32"]
    rows = run["cases"][0]["rows"]
    assert [row["name"] for row in rows if row["role"] == "ours"] == list(table.OURS)
    assert rows[0]["error"] <= 1
    assert run["environment"]["threads"] == rope_cpu.get_num_threads()


def test_peers_are_skipped_by_name_with_the_reason(bench, capsys, monkeypatch):
    for module in ("torch", "onnx", "jax"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "rope_cpu.export", raising=False)
    assert bench("decode-1/float32", "--peers") == 0
    out = capsys.readouterr().out
    for name, module in {"torch.compile": "torch", "ORT operator IO-bound": "onnx"}.items():
        assert re.search(f"{name} +skipped: .*{module}", out)
    assert "NumPy rotate_half  " in out


def test_a_number_of_threads_is_set(bench, capsys):
    assert bench("decode-1/float32", "--no-peers", "--threads", "1") == 0
    assert "; 1 of " in capsys.readouterr().out
    assert rope_cpu.get_num_threads() == 1


def test_an_error_that_is_not_finite_is_text_in_json(bench, monkeypatch, tmp_path):
    """JSON has no NaN."""
    monkeypatch.setattr(Workload, "error", lambda *_: float("nan"))
    path = tmp_path / "run.json"
    assert bench("decode-1/float32", "--no-peers", "--json", str(path)) == 1
    assert json.loads(path.read_text())["cases"][0]["rows"][0]["error"] == "NaN"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("no-such-case", "`pattern`"),
        ("--config /no/such/config.json", "/no/such/config.json"),
        ("decode-1 --threads 0", "`n` is 0; it must be at least 1"),
        ("decode-1 --plot picture.pdf", "picture.pdf"),
        ("decode-1 --json /", "cannot write /: it must be a file in a folder"),
        ("--list --json q.json", "`--json`"),
        ("--list --threads 1", "`--threads`"),
        ("--layer-type full_attention", "full_attention"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_timed(bench, monkeypatch, words, text, capsys):
    monkeypatch.setattr(command, "measure", lambda *args, **more: pytest.fail("it was timed"))
    with pytest.raises(UsageError, match=text):
        bench(*words.split())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("config", "words", "heads"),
    [
        (FLUX, "", "2 + 2 heads of 128"),
        (LLAMA | {"model_type": "mystery", "rope_theta": 1e4}, "--half", "32 + 32 heads of 128"),
        (LLAMA | {"num_key_value_heads": 4}, "", "32 + 4 heads of 128"),
    ],
)
def test_a_model_of_a_file(config, words, heads, tmp_path, bench, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = ("--config", str(path), *words.split(), "--no-peers")
    assert bench("decode-1/float32", *options) == 0
    assert f"shapes of {path}: {heads}" in capsys.readouterr().out


def test_models_of_several_axes_rotate_text(tmp_path, bench, capsys, monkeypatch):
    pytest.importorskip("onnx")
    monkeypatch.delitem(table.PEERS, "torch.compile")  # it takes seconds
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_VL))
    assert bench("--config", str(tmp_path), "decode-1/float32", "--peers") == 0
    out = capsys.readouterr().out
    assert "NumPy rotate_half  " in out
    assert re.search("ORT operator IO-bound +skipped: takes one position per token", out)
