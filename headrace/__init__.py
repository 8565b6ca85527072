"""Headrace's base package: the environment SDK, and the contract, configuration and client that all services share.

It imports no torch, no vLLM and no transformers; importing `headrace` itself loads only the environment SDK.
"""

from headrace.environment import Environment, Sample
from headrace.trajectory import Score

__all__ = ["Environment", "Sample", "Score", "serve"]


def serve(environment: Environment, port: int, host: str = "127.0.0.1") -> None:
    """Serve `environment` over gRPC on `host:port` until SIGTERM or SIGINT. Port 0 takes a free port and logs it.

    Raises `ServiceError` if the port is busy.
    """
    # gRPC is loaded only by a process that serves
    from headrace import environment_server

    environment_server.run(environment, host, port)
