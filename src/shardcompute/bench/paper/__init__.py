"""`bench paper`: tables of a published paper, run again here: weights in fewer bits, six workers by batch and link."""
