"""What everything else rests on and that knows nothing of a run: errors, files, addresses, HTTP, TLS, devices."""
