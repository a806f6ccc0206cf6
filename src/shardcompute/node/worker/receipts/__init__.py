"""What a worker signs for: rows that its stages computed of sessions whose answers are to have a receipt."""
