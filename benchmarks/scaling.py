"""Project the step of a data parallel run to more GPUs than are here; ``benchmarks/results`` has what it prints.

Nothing is measured. What goes in are the bytes that ``distributed.py`` counted for each parameter, and published
speeds. For one process of N, P parameters of b bytes, and a ring algorithm (NCCL and gloo use one for large messages):

- half an all-reduce, that is a reduce-scatter, an all-gather or a pipelined broadcast:
  ``t = (N - 1) / N * b * P / speed + buckets * ceil(log2(N)) * latency``
- computation: ``2 * P * tokens / (peak * utilization)`` forward, twice as much backward
- ``ort_ddp`` waits ``max(2 * t - backward, 2 * t / buckets)``, ``ort_zero1_native`` ``t`` more, ``ort_zero1`` ``3 * t``
- efficiency: ``(forward + backward) / (forward + backward + waits)``, without the time of the optimizer itself
- memory for weights, gradients and optimizer: ``P * (2 * b + 12)`` under DDP, ``P * (2 * b + 12 / N)`` under ZeRO, with
  float32 weights and AdamW's two states for a module in bfloat16
"""

import math
from dataclasses import dataclass

GPUS = (8, 64, 512)


@dataclass(frozen=True)
class Job:
    """A model, and what each GPU does of it in a step.

    Args:
        name: For the table's title.
        parameters: Of the model.
        tokens: For each GPU, in a step.
        bytes_per_gradient: Also of a gathered weight.
    """

    name: str
    parameters: float
    tokens: int
    bytes_per_gradient: int = 2


@dataclass(frozen=True)
class Cluster:
    """GPUs and their links.

    Args:
        flops: Of a GPU, in 1/s: the published peak.
        utilization: Share of it that the model's matrix products reach; assumed.
        within: Bytes a second that a GPU sends to others of its node, one direction.
        between: The same to other nodes.
        node: GPUs of a node.
        latency: Of one message, in seconds; assumed.
    """

    flops: float = 989e12  # NVIDIA H100 SXM datasheet: bfloat16, dense
    utilization: float = 0.4
    within: float = 450e9  # the same: NVLink 4, 900 GB/s both directions together
    between: float = 50e9  # ConnectX-7 NDR, 400 Gb/s for each GPU
    node: int = 8
    latency: float = 10e-6

    def transfer(self, data: float, count: int) -> float:
        """Seconds of one half of a ring all-reduce: a reduce-scatter, or an all-gather."""
        speed = self.within if count <= self.node else self.between
        buckets = math.ceil(data / 25e6)
        return (count - 1) / count * data / speed + buckets * math.ceil(math.log2(count)) * self.latency


def table(job: Job, cluster: Cluster) -> list[str]:
    """Return the lines of the table for a job."""
    forward = 2 * job.parameters * job.tokens / (cluster.flops * cluster.utilization)
    backward = 2 * forward
    data = job.parameters * job.bytes_per_gradient
    lines = [
        f"**{job.name}**: {forward * 1e3:.0f} ms forward, {backward * 1e3:.0f} ms backward",
        "",
        "| GPUs | `ort_ddp` waits | efficiency | `ort_zero1_native` waits | efficiency | `ort_zero1` waits | efficiency"
        " | memory, `ort_ddp` | memory, ZeRO |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for count in GPUS:
        half = cluster.transfer(data, count)
        last_bucket = 2 * half / math.ceil(data / 25e6)  # has no computation left to hide behind
        ddp = max(2 * half - backward, last_bucket)
        cells = [f"{count}"]
        for waits in (ddp, ddp + half, 3 * half):
            cells += [f"{waits * 1e3:.0f} ms", f"{(forward + backward) / (forward + backward + waits):.0%}"]
        for states in (12, 12 / count):  # float32 weights and two states of Adam
            cells.append(f"{job.parameters * (2 * job.bytes_per_gradient + states) / 1e9:.1f} GB")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the tables."""
    jobs = (
        Job("350M parameters, 16,384 tokens per GPU", 350e6, 16_384),
        Job("1.5B parameters, 8,192 tokens per GPU", 1.5e9, 8_192),
        Job("3B parameters, 4,096 tokens per GPU", 3e9, 4_096),
    )
    for job in jobs:
        print("\n".join(table(job, Cluster())), end="\n\n")


if __name__ == "__main__":
    main()
