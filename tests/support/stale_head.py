"""A fault injected into the worker: the packed copy of a tied head is not renewed after a reload."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from headrace_services.rollout.weight_engine import WeightChannelEngine, WeightChannelExtension

BACKEND = "stale-head"


class StaleHeadEngine(WeightChannelEngine):
    def repack_tied_head(self) -> None:
        pass


class StaleHeadExtension(WeightChannelExtension):
    pass


WeightTransferEngineFactory.register_engine(BACKEND, StaleHeadEngine)
