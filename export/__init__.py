"""ONNX export: the same rotation as graph ops, validated under onnxruntime."""
