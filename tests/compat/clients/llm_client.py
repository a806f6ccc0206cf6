"""`llm` with an entry in `extra-openai-models.yaml`. Arguments: url, key, model."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

URL, KEY, MODEL = sys.argv[1:]
PROGRAM = str(pathlib.Path(sys.executable).with_name("llm"))

with tempfile.TemporaryDirectory() as folder:
    entry = f'- model_id: swarm\n  model_name: "{MODEL}"\n  api_base: "{URL}/v1"\n  api_key_name: swarm\n'
    pathlib.Path(folder, "extra-openai-models.yaml").write_text(entry)
    surroundings = {**os.environ, "LLM_USER_PATH": folder}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [PROGRAM, *arguments], env=surroundings, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run("keys", "set", "swarm", "--value", KEY)
    assert "swarm" in run("models", "list")
    options = ["-m", "swarm", "-o", "temperature", "0", "-o", "max_tokens", "12"]
    words = run("prompt", *options, "Say hello.")
    assert words
    assert run("prompt", *options, "--no-stream", "Say hello.") == words
