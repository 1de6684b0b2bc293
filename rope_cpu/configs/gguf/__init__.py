"""From a GGUF file, the format of llama.cpp, to the rotation it describes."""
