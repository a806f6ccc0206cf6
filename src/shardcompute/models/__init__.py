"""What a model is: its spec, its families as data, one decoder for all of them, its tokenizer."""
