"""Cost: what tokens take of energy and money, by machines, speeds and prices as they are known. Pure."""
