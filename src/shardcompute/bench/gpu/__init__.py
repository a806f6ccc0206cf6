"""`bench gpu`: how near a CUDA device comes to the bandwidth of its memory, with dense matrices and with experts."""
