"""`bench drafts`: how often a draft head guesses right, what a row costs, and what rows of second guesses promise.

Owns the guesses behind every token of an answer, and the arithmetic of what sending some of them would bring. May call
`runtime` for the model and its draft head in this process, and `bench`'s own shared files.
"""
