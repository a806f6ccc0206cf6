"""`bench trust`: which cheats audits find, how soon, at which rate, and how often they would accuse the honest."""
