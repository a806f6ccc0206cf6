"""`bench tensor`: one stream on one rank with one thread, against ranks and against stages with a thread each."""
