"""Commands that generate text: `run` for one answer, `chat` for a conversation on a terminal.

Owns prompts from arguments and pipes, line editing and history, slash commands, transcripts, and how an answer is
streamed and told. May call `cli.cluster` and `cli.models` to find who answers: a cluster, or an engine in this process.
"""
