"""Students: small models of a model's own vocabulary, made from some of its layers and taught by it.

What a student looks like follows from its parent (`shape`); it is computed in torch (`student_net`), fitted to what the
parent says of its own text (`text_collection`, `student_loop`), examined (`student_evaluation`) and kept as an ordinary
checkpoint folder (`student_folder`, `tokenizer_files`); one run does it all (`student_run`) and can be gone on with
(`unfinished`). May call `draft_training` and what that may call; only `cli.models` imports it.
"""
