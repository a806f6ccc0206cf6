"""Audits of answers: drawn from what stages signed, computed again elsewhere, judged, and acted upon."""
