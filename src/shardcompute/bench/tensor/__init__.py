"""`bench tensor`: one stream on one rank with one thread, against several ranks with a thread each."""
