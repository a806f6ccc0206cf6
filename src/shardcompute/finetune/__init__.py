"""Fine-tuning: low-rank adapters (LoRA) of a served model, taught on the same stages that serve it.

Owns the reading of training files (`data`), a differentiable stage of layers with its own adapters and optimiser
(`stage`), the loop over steps (`training`), checkpoints, the PEFT folder that comes of it, and what machines say to
each other that teach together (`swarm`). What needs torch imports it in modules of its own, so that plans and files can
be read without it. May call `runtime`, `weights`, `models`, `collectives`, `wire` and `backends`; knows no node.
"""
