"""`lm-eval` (local-completions) on a local task. Arguments: url, key, model, data file, file for the scores."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile

URL, KEY, MODEL, DATA, SCORES = sys.argv[1:]
ROWS = 6
os.environ |= {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
TASK = """
task: last_word
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{rows}"}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{word}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""

with tempfile.TemporaryDirectory() as folder:
    os.environ["HF_HOME"] = folder
    rows = pathlib.Path(folder, "rows.jsonl")
    with open(DATA, encoding="utf-8") as lines, rows.open("w") as out:
        for _, line in zip(range(ROWS), lines, strict=False):
            context, _, word = json.loads(line)["text"].rpartition(" ")
            out.write(json.dumps({"context": context, "word": f" {word}"}) + "\n")
    pathlib.Path(folder, "last_word.yaml").write_text(TASK.format(rows=rows))

    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{URL}/v1/completions",
            "auth_token": KEY,
            "num_concurrent": 1,
            "max_length": 2048,
        },
        tasks=["last_word"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        batch_size=2,
    )
    scores = [sample["resps"] for sample in results["samples"]["last_word"]]
    assert len(scores) == ROWS
    pathlib.Path(SCORES).write_text(json.dumps(scores))
