"""Draft training: distils a model into a draft head (`models.draft_head`), with torch: where all of the model is at
hand or (`swarm`) through a cluster that serves it.

Self-play makes the data (`words`, `questions`, `passages`, `scripts`, `dialogue`, `self_play`, with the model as its
`teacher`), the model's final states over it are the training rows (`training_rows`), a small network (`draft_net`) is
fitted to them (`training_loop`) and examined (`evaluation`); one run does it all (`train`) and can be gone on with
(`resumption`). May call `backends`, `models`, `weights` and `core`; nothing that serves imports it, only `cli.models`.
"""
