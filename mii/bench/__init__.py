"""`mii bench`: load on a server, and what its users would feel."""
