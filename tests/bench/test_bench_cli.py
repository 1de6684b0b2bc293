"""`rope-cpu bench`: listing, selection, output, errors; no test depends on measured times."""

import json

import numpy as np
import pytest

import rope_cpu
from rope_cpu.bench import cli, listing, models, results
from rope_cpu.bench.environment import record
from rope_cpu.bench.measurement.measure import measure
from rope_cpu.bench.measurement.timing import Effort
from rope_cpu.bench.suites import rotations
from rope_cpu.bench.suites.catalog import catalog, select
from rope_cpu.command_line import UsageError

QUICK = Effort(1e-6, 0.0, least=2, most=2)


def test_the_catalog_has_every_shape_dtype_and_variant(cases):
    names = {case.name for case in cases}
    shapes = [
        "decode-1",
        "decode-8",
        "decode-64",
        "prefill-128",
        "prefill-512",
        "prefill-4096",
        "prefill-32768",
    ]
    for shape in shapes:
        for dtype in ("bfloat16", "float32", "float16", "float64"):
            for variant in ("", "/interleaved", "/out", "/cold", "/interleaved/out"):
                assert f"{shape}/{dtype}{variant}" in names
    assert {
        "partial/float32",
        "axial-2d/bfloat16",
        "mrope/bfloat16",
        "shift/bfloat16",
        "convert",
        "export",
    } <= names
    assert len(names) == len(cases)


def test_a_plain_run_has_the_headline_and_one_change_at_a_time(cases):
    plain = {case.name for case in select(cases, [])}
    assert {
        "decode-1/bfloat16",
        "prefill-512/float32",
        "prefill-512/float64",
        "prefill-512/bfloat16/out",
    } <= plain
    assert "prefill-512/float64/out" not in plain
    assert len(plain) < 50


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("prefill-128/float32", ["prefill-128/float32"]),
        ("prefill-128", ["prefill-128/bfloat16", "prefill-128/float32"]),
        ("prefill-128/*16/out", ["prefill-128/bfloat16/out", "prefill-128/float16/out"]),
        ("decode-8/float64/o", ["decode-8/float64/out", "decode-8/float64/out/cold"]),
    ],
)
def test_patterns_select_cases(cases, pattern, names):
    assert [case.name for case in select(cases, [pattern])] == names


@pytest.mark.parametrize(
    "name", ["partial/bfloat16", "layouts", "angles-4096", "plan-64", "shift/float32", "export"]
)
def test_other_cases_run(cases, name):
    pytest.importorskip("onnx")
    (case,) = select(cases, [name])
    result = measure(case, QUICK)
    assert {row.status for row in result.rows} == {"timed"}
    assert result.limit or name == "export"


@pytest.mark.parametrize("cache", [2**22, 2**24, 2**25])
def test_cold_cases_have_more_arrays_than_the_caches_hold(cache, monkeypatch):
    monkeypatch.setattr(rotations, "last_level_cache", lambda: cache)
    (case,) = select(catalog(models.known("llama3-8b")), ["decode-1/bfloat16/cold"])
    _, prepare = case.contenders()[0]
    call = prepare()
    q, k, _ = zip(*call.argument_sets, strict=True)
    assert len({x.ctypes.data for x in q}) == len(q)
    assert sum(x.nbytes for x in (*q, *k)) > cache


@pytest.mark.parametrize("pattern", ["*", "prefill-512"])
def test_a_listing_cuts_nothing_and_keeps_its_columns(bench, cases, capsys, pattern):
    assert bench("--list", pattern) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = select(cases, [pattern])
    assert [(line[0], *line[2:].split(maxsplit=1)) for line in lines] == [
        ("*" if case.default else " ", case.name, case.what) for case in listed
    ]
    assert len({len(line) - len(case.what) for line, case in zip(lines, listed, strict=True)}) == 1


def test_a_listing_without_patterns_is_the_overview(bench, cases, capsys):
    assert bench("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == list(listing.overview(cases, models.known("llama3-8b")))


def test_a_run_prints_and_writes(bench, capsys, tmp_path):
    path = tmp_path / "run.json"
    assert bench("decode-1/float32", "plan-64", "--no-peers", "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "decode-1/float32: one token, 32 + 8 heads of 128, in place" in out
    forecast = out.index("2 cases, about 5 s")
    assert forecast < out.index("decode-1/float32")  # before anything is timed
    assert max(map(len, out.splitlines())) <= 100
    run = results.load(path)
    assert [case.name for case in run.cases] == ["decode-1/float32", "plan-64"]
    assert [row.name for row in run.cases[0].timed("ours")] == ["plan", "plan, new arrays", "call"]
    assert run.cases[0].base.error <= 1
    assert run.environment["threads"] == rope_cpu.get_num_threads()


def test_peers_are_skipped_by_name_with_the_reason(bench, capsys, monkeypatch):
    from rope_cpu.bench.implementations import rotation_call

    monkeypatch.setattr(rotation_call, "find_spec", lambda name: None)
    assert bench("decode-1/float32", "--peers") == 0
    out = capsys.readouterr().out
    assert "skipped: torch is not installed (torch eager, torch.compile)" in out
    assert "skipped: jax is not installed (JAX jit)" in out
    assert "NumPy rotate_half  " in out


def test_a_slower_build_fails_where_asked_to(bench, capsys, monkeypatch, tmp_path):
    path = tmp_path / "old.json"
    assert bench("plan-64", "--json", str(path)) == 0
    data = json.loads(path.read_text())
    for row in data["cases"][0]["rows"]:
        row["samples"] = [1e-12 if row["role"] == "ours" else 1.0] * 15
    path.write_text(json.dumps(data))
    many = Effort(1e-6, 9e9, least=15, most=15)
    monkeypatch.setattr(cli, "measure", lambda case: measure(case, many))
    assert bench("plan-64", "--compare", str(path), "--fail-slower", "10%") == 1
    assert "slower" in capsys.readouterr().out
    assert bench("plan-64", "--compare", str(path)) == 0
    for row in data["cases"][0]["rows"]:
        row["samples"] = [1.0 if row["role"] == "ours" else 1e-12] * 15
    path.write_text(json.dumps(data))
    assert bench("plan-64", "--compare", str(path), "--fail-slower", "10%") == 0


def test_fail_slower_refuses_a_file_without_the_rows_that_were_timed(bench, capsys, tmp_path):
    """Of other cases, and of the same ones on several threads, whose rows have other names."""
    path = tmp_path / "old.json"
    assert bench("plan-64", "--json", str(path)) == 0
    data = json.loads(path.read_text())
    (case,) = data["cases"]
    on_two = [row | {"name": f"{row['name']}, 2 threads"} for row in case["rows"]]
    for other in (case | {"name": "plan-4096"}, case | {"rows": on_two}):
        path.write_text(json.dumps(data | {"cases": [other]}))
        assert bench("plan-64", "--compare", str(path)) == 0
        assert "Nothing was compared" in capsys.readouterr().out
        with pytest.raises(UsageError, match="`--fail-slower` has nothing to judge"):
            bench("plan-64", "--compare", str(path), "--fail-slower", "1%")


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
        (["plan-64", "--fail-slower", "10%"], "`--fail-slower` is 10%"),
        (["plan-64", "--threads", "4096"], "`--threads` is 4096; it must be at most"),
        (["plan-64", "--threads", "0"], "`--threads` is 0; it must be at least 1"),
        (["plan-64", "--plot", "picture.pdf"], "'picture.pdf'; the name must end in .png or .svg"),
        (["plan-64", "--plot", "/no/such/folder/run.png"], "/no/such/folder"),
        (["plan-64", "--json", "/"], "cannot write /: it is a folder"),
        (["--list", "--json", "q.json"], "`--json` is given with `--list`"),
        (["--list", "--compare", "b.json"], "`--compare` is given with `--list`"),
        (["--list", "--plot", "x.png"], "`--plot` is given with `--list`"),
        (["--layer-type", "full_attention"], "`--layer-type` is 'full_attention'"),
        (["--list", "--fail-slower", "1%"], "`--fail-slower` is given with `--list`"),
        (["--list", "--from", "run.json"], "`--from` is given with `--list`"),
        (["--from", "run.json", "--json", "new.json"], "`--json` is given with `--from`"),
        (["--from", "run.json", "--model", "llama3-8b"], "`--model` is given with `--from`"),
        (["--from", "run.json", "--config", "q.json"], "`--config` is given with `--from`"),
        (["--from", "run.json", "--layer-type", "a"], "`--layer-type` is given with `--from`"),
        (["--from", "run.json", "--peers"], "`--peers` is given with `--from`"),
        (["--from", "run.json", "--no-peers"], "`--no-peers` is given with `--from`"),
        (["--from", "run.json", "--threads", "1"], "`--threads` is given with `--from`"),
        (["--from", "run.json", "--fail-slower", "1%"], "`--fail-slower` is 1%"),
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
        (["--fail-slower", "abc"], "argument --fail-slower: 'abc' is not a percentage"),
        (["--fail-slower=-1%"], "argument --fail-slower: '-1%' is not a percentage above 0"),
        (["--fail-slower=inf"], "argument --fail-slower: 'inf' is not a percentage above 0"),
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
    peers = rotations.peer_names
    monkeypatch.setattr(  # torch.compile takes seconds
        rotations,
        "peer_names",
        lambda interleaved: [name for name in peers(interleaved) if name != "torch.compile"],
    )
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
