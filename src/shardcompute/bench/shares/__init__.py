"""`bench shares`: what computing layers on shares costs, and how near it comes to computing them plainly."""
