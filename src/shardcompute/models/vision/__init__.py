"""How models see: pictures made into patches, the tower over them, and what checkpoints say about both.

Owns the families of towers, preprocessing as their own image processors do it, and the tower's network, written against
`backends.ops`. May call `models`, `models.families`, `backends` and `core`. Decoding of image files is not done here.
"""
