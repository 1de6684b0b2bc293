"""`rope-cpu bench`: listing, selection, output, errors; no test depends on measured times."""

import json

import numpy as np
import pytest

import rope_cpu
from rope_cpu.bench import cases as table
from rope_cpu.bench import cli, models, workload
from rope_cpu.bench.cases import all_cases
from rope_cpu.bench.cli import select
from rope_cpu.bench.environment import record
from rope_cpu.bench.measure import measure
from rope_cpu.bench.timing import Effort
from rope_cpu.command_line import UsageError

QUICK = Effort(1e-6, 0.0, least=2, most=2)


def test_the_table_begins_with_q_and_k_apart(cases):
    names = [case.name for case in cases]
    shapes = [f"separate-{n}/float32" for n in (1, 32, 128, 512, 2048, 4096)]
    assert names[:12] == [name + out for name in shapes for out in ("", "/out")]
    assert len(set(names)) == len(names)
    for case in cases[:12]:
        assert case.default
        assert {"ORT operator IO-bound", "ORT RotaryEmbedding-23 IO-bound"} <= set(case.peers)
        assert ("plan, unaligned out" in case.ours) == case.name.endswith("/out")


def test_q_and_k_apart_are_contiguous_and_results_aligned(cases):
    """ONNX takes them as (batch, seq, heads·head_dim)."""
    (case,) = select(cases, ["separate-32/float32/out"])
    for name, start in (("plan", 0), ("plan, unaligned out", 16)):
        q, k, out = case.ours[name]().argument_sets[0]
        assert (q.shape, k.shape) == ((1, 32, 32, 128), (1, 32, 8, 128))
        assert all(x.flags.c_contiguous for x in (q, k, *out))
        assert [x.ctypes.data % 64 for x in out] == [start, start]
        assert not np.shares_memory(q, out[0])
    (in_place,) = select(cases, ["separate-32/float32"])
    q, k, out = in_place.ours["plan"]().argument_sets[0]
    assert out[0] is q
    assert out[1] is k


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("prefill-128/float32", ["prefill-128/float32"]),
        (
            "prefill-128",
            [
                f"prefill-128/{name}"
                for name in ("bfloat16", "bfloat16/out", "float32", "float32/out")
            ],
        ),
        ("prefill-128/*16/out", ["prefill-128/bfloat16/out"]),
        ("decode-8/float32/o", ["decode-8/float32/out"]),
        ("decode-1", ["decode-1/bfloat16", "decode-1/float32"]),
    ],
)
def test_patterns_select_cases(cases, pattern, names):
    assert [case.name for case in select(cases, [pattern])] == names


@pytest.mark.parametrize("name", ["partial/bfloat16", "layouts", "angles-axes", "plan-64"])
def test_other_cases_run(cases, name):
    (case,) = select(cases, [name])
    result = measure(case, QUICK)
    assert {row.status for row in result.rows} == {"timed"}
    assert result.limit


@pytest.mark.parametrize("cache", [2**22, 2**24, 2**25])
def test_cold_cases_have_more_arrays_than_the_caches_hold(cache, monkeypatch):
    monkeypatch.setattr(workload, "last_level_cache", lambda: cache)
    (case,) = select(all_cases(models.known("llama3-8b")), ["decode-1/bfloat16/cold"])
    call = case.ours["plan"]()
    q, k, _ = zip(*call.argument_sets, strict=True)
    assert len({x.ctypes.data for x in q}) == len(q)
    assert sum(x.nbytes for x in (*q, *k)) > cache


@pytest.mark.parametrize("patterns", [[], ["prefill-512"]])
def test_a_listing_has_names_and_descriptions(bench, cases, capsys, patterns):
    assert bench("--list", *patterns) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = select(cases, patterns) if patterns else cases
    assert [(line[0], *line[2:].split(maxsplit=1)) for line in lines] == [
        ("*" if case.default else " ", case.name, case.what) for case in listed
    ]


def test_a_run_prints_and_writes(bench, capsys, tmp_path):
    path = tmp_path / "run.json"
    assert bench("decode-1/float32", "plan-64", "--no-peers", "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "decode-1/float32: one token, q and k packed, float32, in place" in out
    assert "shapes of llama3-8b: 32 + 8 heads of 128" in out
    assert max(map(len, out.splitlines())) <= 100
    run = json.loads(path.read_text())
    assert [case["name"] for case in run["cases"]] == ["decode-1/float32", "plan-64"]
    ours = [row for row in run["cases"][0]["rows"] if row["role"] == "ours"]
    assert [row["name"] for row in ours] == ["plan", "plan, new arrays", "call"]
    assert ours[0]["error"] <= 1
    assert run["environment"]["threads"] == rope_cpu.get_num_threads()


def test_a_run_is_compared_with_an_older_one(bench, capsys, tmp_path):
    path = tmp_path / "old.json"
    assert bench("plan-64", "--json", str(path)) == 0
    data = json.loads(path.read_text())
    data["cases"][0]["rows"][0]["seconds"]["median"] = 1e-12
    path.write_text(json.dumps(data))
    assert bench("plan-64", "--compare", str(path)) == 0
    assert "0.00 ns" in capsys.readouterr().out
    assert bench("plan-4096", "--compare", str(path)) == 0
    assert "Nothing was compared" in capsys.readouterr().out


def test_peers_are_skipped_by_name_with_the_reason(bench, capsys, monkeypatch):
    from rope_cpu.bench import rotations

    monkeypatch.setattr(rotations, "find_spec", lambda name: None)
    assert bench("decode-1/float32", "--peers") == 0
    out = capsys.readouterr().out
    assert "skipped: torch is not installed (torch eager, torch.compile)" in out
    assert "skipped: jax is not installed (JAX jit)" in out
    assert "NumPy rotate_half  " in out


def test_scaling_times_ours_at_each_number_of_threads(bench, capsys):
    if rope_cpu.get_num_threads() < 2:
        pytest.skip("one thread only")
    assert bench("decode-64/float32", "--threads", "1,2") == 0
    out = capsys.readouterr().out
    assert "plan, 1 thread " in out
    assert "plan, 2 threads " in out
    assert "  call " not in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["no-such-case"], "`pattern` is 'no-such-case'"),
        (["--model", "gpt-5"], "`model` is 'gpt-5'"),
        (["--config", "/no/such/config.json"], "/no/such/config.json"),
        (["plan-64", "--threads", "4096"], "`--threads` is 4096; it must be at most"),
        (
            ["decode-1", "--threads", "1,2", "--peers"],
            r"`--peers` is given with `--threads` \(1, 2",
        ),
        (["plan-64", "--threads", "0"], "`--threads` is 0; it must be at least 1"),
        (["plan-64", "--plot", "picture.pdf"], "'picture.pdf'; the name must end in .png or .svg"),
        (["plan-64", "--plot", "/no/such/folder/run.png"], "/no/such/folder"),
        (["plan-64", "--json", "/"], "cannot write /: it is a folder"),
        (["--list", "--json", "q.json"], "`--json` is given with `--list`"),
        (["--list", "--compare", "b.json"], "`--compare` is given with `--list`"),
        (["--list", "--plot", "x.png"], "`--plot` is given with `--list`"),
        (["--layer-type", "full_attention"], "`--layer-type` is 'full_attention'"),
        (["plan-64", "--json", "/no/such/folder/run.json"], "/no/such/folder"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_timed(bench, monkeypatch, words, text):
    monkeypatch.setattr(cli, "measure", lambda *args, **more: pytest.fail("it was timed"))
    with pytest.raises(UsageError, match=text.replace("[", r"\[")):
        bench(*words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--threads", "a"], "argument --threads: 'a' is not a number of threads"),
        (["--threads", "1,,2"], "argument --threads: '1,,2' is not a number of threads"),
    ],
)
def test_bad_arguments_are_named(bench, capsys, words, text):
    with pytest.raises(SystemExit, match="2"):
        bench(*words)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", models.MODELS)
def test_known_models(name):
    model = models.known(name)
    config = models.MODELS[name]
    assert (model.heads, model.kv_heads) == (
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    assert model.own.head_dim == config["head_dim"]
    assert model.own.interleaved == (name == "cohere-35b")
    assert model.other.interleaved != model.own.interleaved
    assert model.own.inv_freq[0] == model.other.inv_freq[0] == 1.0


def test_a_config_file_gives_heads_and_rotation(tmp_path):
    config = models.MODELS["qwen3-0.6b"] | {"head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = models.from_file(tmp_path)
    assert (model.heads, model.kv_heads, model.own.head_dim) == (16, 8, 64)
    assert model.name == tmp_path.name


@pytest.mark.parametrize(
    ("config", "interleaved"),
    [
        (
            {
                "_class_name": "FluxTransformer2DModel",
                "num_attention_heads": 2,
                "attention_head_dim": 128,
            },
            True,
        ),
        (models.MODELS["llama3-8b"] | {"model_type": "mystery"}, False),
    ],
)
def test_a_model_whose_pairing_cannot_be_overruled_or_is_unknown(
    config, interleaved, tmp_path, bench
):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    assert models.from_file(path).own.interleaved == interleaved
    assert bench("--config", str(path), "decode-1/float32", "--no-peers") == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "model.json"),
        ("[1]", "model.json' holds a list"),
        (None, "model.json"),
        (
            '{"model_type": "llama", "head_dim": 8, "num_attention_heads": "x"}',
            "`num_attention_heads` is 'x'",
        ),
        (
            '{"model_type": "gemma3_text", "num_attention_heads": 4, "head_dim": 8}',
            "`layer_type` is None",
        ),
    ],
)
def test_a_bad_config_is_named(text, message, tmp_path, bench):
    path = tmp_path / "model.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        bench("--config", str(path))


def test_models_of_several_axes_rotate_text(tmp_path, bench, capsys, monkeypatch):
    pytest.importorskip("onnx")
    peers = {name: peer for name, peer in table.PEERS.items() if name != "torch.compile"}
    monkeypatch.setattr(table, "PEERS", peers)  # torch.compile takes seconds
    config = models.MODELS["qwen2-7b"] | {
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bench("--config", str(tmp_path), "decode-1/float32", "layouts", "--peers") == 0
    out = capsys.readouterr().out
    assert "NumPy rotate_half  " in out
    assert "contiguous bshd float32  " in out
    assert "skipped: takes one position per token (ORT" in out


def test_the_environment_is_recorded():
    facts = record()
    assert facts["cores"] >= 1
    assert facts["versions"]["numpy"] == np.__version__
    assert {"processor", "governor", "caches", "threads", "load"} <= set(facts)
    json.dumps(facts, allow_nan=False)
