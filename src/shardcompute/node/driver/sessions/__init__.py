"""Sessions of a driver: what is known of each, the KV memory that they may take, and prefixes that outlive them."""
