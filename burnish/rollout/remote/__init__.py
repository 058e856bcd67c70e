"""What engines on the other side of HTTP have in common: connections, servers and their lives, requests in flight, updates."""
