"""What is learned: parts of each kind of adapter, their flat vector, and linear maps that compute with them."""
