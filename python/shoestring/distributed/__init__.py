"""Training in several processes over PyTorch's process groups: the parts of :func:`shoestring.parallelize`."""

from shoestring.distributed.diloco import DiLoCo, LocalSGD
from shoestring.distributed.groups import broadcast_module, mean_over_ranks, survivors
from shoestring.distributed.links import Link, measure_link
from shoestring.distributed.parallelize import RankBytes
from shoestring.distributed.shard import shard

__all__ = [
    "DiLoCo",
    "Link",
    "LocalSGD",
    "RankBytes",
    "broadcast_module",
    "mean_over_ranks",
    "measure_link",
    "shard",
    "survivors",
]
