"""What is watched while chains serve: decayed estimates of what steps take, what has drifted, and whether anything has
changed that placement depends on."""
