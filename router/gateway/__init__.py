"""The REST gateway: HTTP and JSON in front of the relay, in the router's own event loop."""
