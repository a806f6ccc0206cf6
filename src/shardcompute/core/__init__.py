"""What every room shares: errors, settings, requests and tokens, batches. Imports nothing of ours."""
