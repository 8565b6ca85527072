"""What listens and what calls: gRPC and HTTP services, their credentials and limits."""
