"""`bench privacy`: what a machine that holds some layers reads of the text that passes it, by attacks."""
