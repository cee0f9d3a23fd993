"""`python -m stages.s07_cuda_graph.bench_many_rows`: a whole decode step of 24 to 512 rows, three ways round.

Embedding to logits in one CUDA graph, random weights of the real shapes, 512 keys a row. The graphs are replayed in
turns, so that clocks and heat are the same for all: as the model says it; with what lies between the QKV product and
attention in one launch; and with products in halves that the norm adds up.
"""

import statistics
from unittest.mock import patch

import torch
from torch import Tensor

from reference.bench.harness import Result
from stages.s01_forward.model import Model
from stages.s03_paged_kv.kernel_workloads import record
from stages.s07_cuda_graph import many_rows
from stages.s07_cuda_graph.bench_few_rows import KEYS, make_context, measure, shapes_argument

ROWS = (24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
TURNS, REPLAYS = 7, 5


@torch.inference_mode()
def step_times(model: Model, rows: int) -> dict[str, float]:
    """Seconds of a step, by who computes it."""
    ctx = make_context(model, rows)
    ids = torch.randint(1000, (rows,), device="cuda")
    positions = torch.full_like(ids, KEYS - 1)

    def whole() -> Tensor:
        with patch.object(many_rows, "product", lambda x, linear: linear(x)):
            return model.logits(many_rows.forward_many(model, ids, positions, ctx))

    graphs = {
        "the model": record([lambda: model.logits(model(ids, positions, ctx))]),
        "one launch before attention": record([whole]),
        "and products in halves": record([lambda: model.logits(many_rows.forward_many(model, ids, positions, ctx))]),
    }
    times: dict[str, list[float]] = {who: [] for who in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(TURNS):
        for who, graph in graphs.items():
            graph.replay()
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times[who].append(start.elapsed_time(end) * 1e-3 / REPLAYS)
    return {who: statistics.median(each) for who, each in times.items()}


def main() -> None:
    names = shapes_argument(__doc__)
    result = Result(
        "s07_many_rows", "Where cuBLAS divides a sum over processors, the norm behind it may as well add the parts up."
    )
    measure(result, step_times, names, ROWS)


if __name__ == "__main__":
    main()
