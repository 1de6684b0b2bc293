"""Saving, metadata, memory, and the error without onnx."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest

from rope_cpu import RotaryEmbedding, __version__, export

ROPE = RotaryEmbedding(128, rope_theta=5e5)


def test_large_tables_go_beside_the_model(tmp_path):
    model = export.export_rope(ROPE, max_positions=4096)
    before = model.SerializeToString()
    export.save(model, tmp_path / "rope.onnx")
    assert model.SerializeToString() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rope.onnx", "rope.onnx.data"]
    assert (tmp_path / "rope.onnx").stat().st_size < 20_000
    assert (tmp_path / "rope.onnx.data").stat().st_size == 2 * 4096 * 64 * 4
    assert export.validate(tmp_path / "rope.onnx", ROPE).passed
    assert (
        onnx.load(tmp_path / "rope.onnx").graph.initializer[0].raw_data
        == model.graph.initializer[0].raw_data
    )


def test_small_models_are_one_file(tmp_path):
    export.save(export.export_rope(ROPE, max_positions=16), tmp_path / "rope.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["rope.onnx"]
    assert export.validate(str(tmp_path / "rope.onnx"), ROPE).passed


def test_attention_with_weights_beside_it(tmp_path, rng):
    rope = RotaryEmbedding(32)
    weights = {name: rng.standard_normal((64, 48)) * 0.1 for name in "qkv"}
    model = export.export_attention(rope, num_heads=2, weights=weights)
    export.save(model, tmp_path / "attention.onnx", external_bytes=4096)
    assert (tmp_path / "attention.onnx.data").stat().st_size == 3 * 64 * 48 * 4
    assert export.validate(tmp_path / "attention.onnx", rope).passed


@pytest.mark.parametrize("name", ["rope.json", "rope.txt", "rope", "rope.onnx.old"])
def test_a_suffix_that_readers_do_not_take_for_protobuf_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=rf"`path` is .*{name}'; .*protobuf.* \.onnx"):
        export.save(export.export_rope(RotaryEmbedding(16)), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["rope.onnx", "ROPE.ONNX", "rope.pb"])
def test_the_suffixes_of_protobuf(name, tmp_path):
    export.save(export.export_rope(RotaryEmbedding(16)), tmp_path / name)
    assert onnx.load(tmp_path / name).graph.node


@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "folder", "link to tables"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    """Writing over a device destroys it, and readers look for tables beside a link."""
    path = tmp_path / "rope.onnx"
    real = tmp_path / "real.onnx"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        real.touch()
        (tmp_path / "rope.onnx.data" if kind == "link to tables" else path).symlink_to(real)
    if kind == "broken link":
        real.unlink()
    before = sorted((file.name, file.lstat().st_mode) for file in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"`path` is .* exists and is not a regular file"):
        export.save(export.export_rope(ROPE, max_positions=16), path)
    assert sorted((file.name, file.lstat().st_mode) for file in tmp_path.iterdir()) == before


SMALL = export.export_rope(ROPE, max_positions=16)
LARGE = export.export_rope(ROPE, max_positions=4096)


def files_in(folder):
    """Return the permissions of the files in a folder by name."""
    return {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}


# The model that is there, the modes of its files, and those of further new files.
MODES = [
    (LARGE, {"rope.onnx": 0o600, "rope.onnx.data": 0o640}, {}),
    (LARGE, {"rope.onnx": 0o664, "rope.onnx.data": 0o640}, {}),
    (SMALL, {"rope.onnx": 0o600}, {"rope.onnx.data": 0o600}),
]


@pytest.mark.parametrize(("before", "modes", "new_modes"), MODES)
def test_files_keep_the_mode_of_the_model_before(tmp_path, before, modes, new_modes):
    """New tables of a private model are private."""
    export.save(before, tmp_path / "rope.onnx")
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    export.save(LARGE, tmp_path / "rope.onnx")
    assert files_in(tmp_path) == modes | new_modes


def test_new_files_have_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "other").touch()
    export.save(LARGE, tmp_path / "rope.onnx")
    modes = files_in(tmp_path)
    assert modes == dict.fromkeys(("other", "rope.onnx", "rope.onnx.data"), modes["other"])


def test_tables_of_the_model_before_are_removed(tmp_path):
    export.save(LARGE, tmp_path / "rope.onnx")
    export.save(SMALL, tmp_path / "rope.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["rope.onnx"]


@pytest.mark.parametrize("before", [None, SMALL], ids=["no model", "a model without tables"])
def test_a_data_file_of_no_model_is_left_alone(tmp_path, before):
    if before is not None:
        export.save(before, tmp_path / "rope.onnx")
    (tmp_path / "rope.onnx.data").write_text("mine")
    export.save(SMALL, tmp_path / "rope.onnx")
    assert (tmp_path / "rope.onnx.data").read_text() == "mine"


def test_a_model_without_its_tables_is_refused(tmp_path):
    """A file that refers to tables elsewhere, or that replaces them, could not be loaded."""
    export.save(LARGE, tmp_path / "rope.onnx")
    model = onnx.load(tmp_path / "rope.onnx", load_external_data=False)
    for name in ("rope.onnx", "other.onnx"):
        with pytest.raises(ValueError, match=r"`model` has the tensor .* in a file beside it"):
            export.save(model, tmp_path / name)
    assert export.validate(tmp_path / "rope.onnx", ROPE).passed


def test_threads_save_one_model(tmp_path):
    before = LARGE.SerializeToString()

    def save(index):
        for _ in range(10):
            export.save(LARGE, tmp_path / f"{index}.onnx")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(save, range(4)))
    assert LARGE.SerializeToString() == before
    for index in range(4):
        assert export.validate(tmp_path / f"{index}.onnx", ROPE).passed


def test_files_of_others_are_not_touched(tmp_path):
    names = ("rope.onnx.part", "rope.onnx.data.part", "model", "data")
    for name in names:
        (tmp_path / name).write_text(name)
    export.save(LARGE, tmp_path / "rope.onnx")
    assert {name: (tmp_path / name).read_text() for name in names} == {n: n for n in names}
    assert set(files_in(tmp_path)) == {*names, "rope.onnx", "rope.onnx.data"}


def test_a_failure_leaves_the_files_of_the_model_before(tmp_path, monkeypatch):
    export.save(LARGE, tmp_path / "rope.onnx")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    after = export.export_rope(RotaryEmbedding(64), max_positions=8192)

    def write_bytes(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match=r"rope\.onnx'") as caught:
        export.save(after, tmp_path / "rope.onnx")
    assert caught.value.errno == errno.ENOSPC
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_saving_leaves_nothing_half_done(tmp_path):
    model = export.export_rope(ROPE, max_positions=4096)
    before = model.SerializeToString()
    path = tmp_path / "missing" / "rope.onnx"
    with pytest.raises(FileNotFoundError) as caught:
        export.save(model, path)
    assert caught.value.filename == str(path)  # not the temporary file
    assert model.SerializeToString() == before
    assert not list(tmp_path.iterdir())


def test_a_file_explains_itself():
    model = export.export_rope(ROPE, metadata={"rope_cpu.config": "{}"})
    entries = {entry.key: entry.value for entry in model.metadata_props}
    assert entries["rope_cpu.version"] == __version__
    assert entries["rope_cpu.config"] == "{}"
    assert json.loads(entries["rope_cpu.export"])["target"] == "onnx"
    assert json.loads(entries["rope_cpu.rotation"])["inv_freq"] == ROPE.inv_freq.tolist()
    assert "half-split" in model.graph.doc_string


MEASURED = """
import time
from pathlib import Path
from rope_cpu import RotaryEmbedding, export
rope = RotaryEmbedding(128, rope_theta=5e5)
export.save(export.export_rope(rope, max_positions=64), "{folder}/small.onnx")
# resource.getrusage would count the memory of the parent before it started this process
def kibibytes(entry):
    return int(Path("/proc/self/status").read_text().split(entry)[1].split()[0])
before = kibibytes("VmRSS:")
start = time.perf_counter()
export.save(export.export_rope(rope, max_positions=131072), "{folder}/rope.onnx")
print(time.perf_counter() - start, (kibibytes("VmHWM:") - before) / 1024)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from Linux' /proc"
)
def test_a_long_table_is_quick_and_small(tmp_path, run_program):
    """131072 positions of 128 elements: 64 MiB of tables, written in less than 300 MiB."""
    out, _ = run_program(MEASURED.format(folder=tmp_path))
    seconds, mebibytes = map(float, out.split())
    print(f"131072 positions: {seconds:.2f} s, {mebibytes:.0f} MiB")
    assert 64 < mebibytes < 300
    assert (tmp_path / "rope.onnx.data").stat().st_size == 64 << 20


def test_the_library_does_not_import_onnx(run_program):
    code = "import sys, rope_cpu; print([m for m in ('onnx', 'onnxruntime') if m in sys.modules])"
    assert run_program(code)[0] == "[]\n"


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_without_the_extra_the_error_names_it(missing, run_program):
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom rope_cpu import export"
    _, err = run_program(code, exits=1)
    assert 'pip install "rope-cpu[all]"' in err.splitlines()[-1]
