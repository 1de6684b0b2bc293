"""From a config.json, a GGUF file or the tensors of a checkpoint to plain data of a model's layers.

`reader` loads a file and chooses the adapter of its kind, `text` (with the differences of single
model types, `quirks`), `vision` or `gguf`, which parses it once to a `Model` (`model`):

- `Model.layers` are its layers with their rope parameters (`layer`). `Model.select` finds those of
  some, and `Model.spec` lets the adapter compute a RopeSpec from these.
- `Model.attention` are the facts of attention that all layers share (`attention`). `Model.layer`
  completes them to a whole `Layer`, and refuses facts that its caller does not name.
- `layer_arrays` (`tensors`) finds the weights of a `Layer`.

`keys` refuses keys of rotations that nothing reads. The facts of model types are in `data`, the
table of language models in `model_types`.
"""
