"""Split learning: whoever has the data keeps its tokens and labels, with the layers next to them, and others compute
the layers between; and what these could still read."""
