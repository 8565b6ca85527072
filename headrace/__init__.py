"""Headrace: the contract that every service and every user's environment shares. Light: no torch, no vllm, no transformers."""
