"""gRPC services on `mii.http2`: typed methods, errors as statuses, health, reflection."""
