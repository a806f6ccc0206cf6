"""Draft training: distils a model into a draft head (`models.draft_head`), where all of it and torch are at hand.

Self-play makes the data (`questions`, `scripts`, `dialogue`, `self_play`), the model's final states over it are the
training rows (`training_rows`), a small network is fitted to them (`training_loop`), and one run does it all (`train`).
May call `backends`, `models`, `weights` and `core`; nothing that serves imports it, only `cli.models`.
"""
