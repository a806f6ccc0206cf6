"""Published measurements, run again with what is here."""
