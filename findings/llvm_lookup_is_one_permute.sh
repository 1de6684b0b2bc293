#!/usr/bin/env bash
# Expected: a lookup in a table of sixteen float32 has no operation in LLVM's vectors, whose shuffles take constant indices. So a kernel names
#   the processor's instruction, or sixteen extracted and inserted lanes go through the stack, one load for each.
# Really: for AVX-512, LLVM makes one vpermps of the sixteen lanes. For AVX2, which has that instruction for eight lanes, it makes one of
#   eight, and goes through the stack for sixteen. The indices must be lanes of a vector, in order.
# Who meets it: kernels in Numba or llvmlite that decode 4 bits (q4_0, nf4, mxfp4) by a table, and avoid names of one processor family.
# Versions: llvmlite 0.50.0. Source: the code that it prints for each processor; no such processor is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check llvmlite==0.50.0
"$folder/venv/bin/python" - <<'PY'
from llvmlite import binding, ir

binding.initialize_all_targets()
binding.initialize_all_asmprinters()
I32 = ir.IntType(32)


def assembly(lanes, processor):
    """Return the code of a function that looks up `lanes` numbers in a table of as many."""
    module = ir.Module()
    floats = ir.VectorType(ir.FloatType(), lanes)
    integers = ir.VectorType(I32, lanes)
    pointers = [floats.as_pointer(), integers.as_pointer(), floats.as_pointer()]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), pointers), "look_up")
    builder = ir.IRBuilder(function.append_basic_block())
    table = builder.load(function.args[0], align=4)
    indices = builder.and_(builder.load(function.args[1], align=4), ir.Constant(integers, [lanes - 1] * lanes))
    result = ir.Constant(floats, ir.Undefined)
    for lane in range(lanes):
        index = builder.extract_element(indices, I32(lane))
        result = builder.insert_element(result, builder.extract_element(table, index), I32(lane))
    builder.store(result, function.args[2], align=4)
    builder.ret_void()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=processor, opt=3)
    return machine.emit_assembly(binding.parse_assembly(str(module)))


counts = {}
for lanes, processor in ((16, "x86-64-v4"), (8, "haswell"), (16, "haswell"), (8, "x86-64")):
    code = assembly(lanes, processor)
    counts[lanes, processor] = (code.count("vpermps"), code.count("(%rsp"))
    permutes, on_stack = counts[lanes, processor]
    print(f"{lanes:2d} lanes, {processor:9s}: {permutes} vpermps, {on_stack} operands on the stack")
assert counts[16, "x86-64-v4"] == (1, 0)
assert counts[8, "haswell"] == (1, 0)
assert counts[16, "haswell"][0] == 0 and counts[16, "haswell"][1] >= 16
assert counts[8, "x86-64"][0] == 0 and counts[8, "x86-64"][1] >= 8
PY
