"""Print the table of docs/onnx.md on windows: decode steps of local layers, in float32.

Each file runs in a process of its own, in turns. A time is the mean of its steps, the median of
the turns. From the repository's root, with the extra `onnx`: python tools/window_caches.py
"""

import json
import subprocess
import sys
import time

import numpy as np

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation.session import open_session

THREADS = 2
TURNS = 3
CACHED = (4000, 32000)
LAYERS = {
    "Gemma 3 4B": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "window": 1024},
    "gpt-oss 20B": {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "window": 128},
}
SINKS = {"gpt-oss 20B": np.zeros(64)}
# Rows beyond the window, which are free again after each move of its rows, and one move's steps.
SLACK = 256
# Options, rows of the buffer beyond the window (None: rows for all tokens), and number of steps.
FILES = {
    '`"ort"`, shared': ({"target": "ort", "cache": "shared"}, None, SLACK + 1),
    '`"ort"`, window': ({"target": "ort", "cache": "window"}, 0, SLACK + 1),
    f"{SLACK} rows more": ({"target": "ort", "cache": "window"}, SLACK, SLACK + 1),
    '`"onnx"`, opset 23': ({"target": "onnx"}, None, 4),
    '`"onnx"`, opset 25': ({"target": "onnx", "opset": 25}, None, 4),
}


def kept_rows(cached, window, slack):
    """Return the rows that GroupQueryAttention keeps of a window cache, by its description."""
    moves = -(-(cached - window - slack) // (slack + 1))
    return cached - moves * (slack + 1)


def shared_steps(session, feeds, cached, capacity, kept):
    """Yield the result of each step over buffers of `capacity`, which hold the last `kept` rows."""
    y = np.empty_like(feeds["q"])
    for name in ("past_key", "past_value"):
        last = feeds[name][:, :, cached - kept :]
        feeds[name] = np.pad(last, [(0, 0), (0, 0), (0, capacity - kept), (0, 0)])
    feeds["past_lengths"] = np.array([cached])
    step = export.bind(session, feeds, {"attention": y})
    while True:
        step()
        yield y
        feeds["past_lengths"] += 1


def growing_steps(session, feeds):
    """Yield the result of each step, whose present is the next one's past."""
    while True:
        y, feeds["past_key"], feeds["past_value"] = session.run(None, feeds)
        yield y


def measured(layer, cached, file):
    """Return milliseconds of a step, megabytes of the cache, and the result of the first step."""
    options = dict(LAYERS[layer])
    exported, slack, count = FILES[file]
    rope = RotaryEmbedding(options.pop("head_dim"))
    end = cached + count
    exported = options | exported | {"sinks": SINKS.get(layer), "layout": "bshd"}
    session = open_session(export.export_attention(rope, max_positions=end, **exported), THREADS)
    rng = np.random.default_rng(68)
    heads = {"q": options["num_heads"], "k": options["num_kv_heads"], "v": options["num_kv_heads"]}
    feeds = {n: rng.standard_normal((1, 1, h, rope.head_dim), np.float32) for n, h in heads.items()}
    for name in ("past_key", "past_value"):
        shape = (1, heads["k"], cached, rope.head_dim)
        feeds[name] = rng.standard_normal(shape, np.float32)
    if "cache" not in exported:
        steps = growing_steps(session, feeds)
    elif slack is None:
        steps = shared_steps(session, feeds, cached, end, cached)
    else:
        window = options["window"]
        kept = kept_rows(cached, window, slack)
        steps = shared_steps(session, feeds, cached, window + slack, kept)
    result = next(steps).tolist()
    start = time.perf_counter()
    for _ in range(count - 1):
        next(steps)
    seconds = (time.perf_counter() - start) / (count - 1)
    megabytes = (feeds["past_key"].nbytes + feeds["past_value"].nbytes) / 1e6
    return {"ms": seconds * 1e3, "MB": megabytes, "result": result}


def main():
    """Print the table, or what one process measures of a layer, a length and a file."""
    if len(sys.argv) > 1:
        layer, cached, file = sys.argv[1:]
        print(json.dumps(measured(layer, int(cached), file)))
        return
    print(f"| layer | cached tokens | {' | '.join(FILES)} |")
    print("|---" * (2 + len(FILES)) + "|")
    for layer in LAYERS:
        for cached in CACHED:
            runs = {file: [] for file in FILES}
            for file in [*FILES] * TURNS:
                command = [sys.executable, __file__, layer, str(cached), file]
                runs[file].append(json.loads(subprocess.check_output(command)))
            results = [np.array(turns[0]["result"]) for turns in runs.values()]
            if max(np.abs(x - results[0]).max() for x in results) > 1e-5:
                raise RuntimeError(f"results of {layer} differ")
            cells = [
                f"{np.median([turn['ms'] for turn in turns]):.3g} ms, {turns[0]['MB']:.3g} MB"
                for turns in runs.values()
            ]
            print(f"| {layer} | {cached:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
