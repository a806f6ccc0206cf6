"""Array primitives and what runs a slice of a model with them: ONNX Runtime on CPUs, torch, a numpy oracle."""
