"""What `startup.py` has a new process do, with the time of each phase.

torch is a phase, and most of an import's time, so this file imports nothing that imports it.
"""

import time
from pathlib import Path
from typing import Any

PHASES = ("interpreter", "import of torch", "import of the engine", "weights, cache, kernels, graphs", "first token")


def start(began: float, folder: Path, device: str, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each phase in a process that was asked for at `began`, and what it captured."""
    times = [began, time.time()]
    import torch

    times.append(time.time())
    from stages.s01_forward.sampling_params import SamplingParams
    from stages.s07_cuda_graph.llm import LLM

    times.append(time.time())
    llm: Any = LLM(folder, device=device, dtype="bfloat16", capture="start", **options)
    if device == "cuda":
        torch.cuda.synchronize()
    times.append(time.time())
    outputs = llm.generate([list(range(1, 129))], SamplingParams(max_tokens=1, ignore_eos=True))
    times.append(time.time())
    if len(outputs[0].token_ids) != 1:
        raise RuntimeError(f"{len(outputs[0].token_ids)} tokens came, 1 was asked for")
    graphs = llm.engine.runner.graphs
    phases = {name: after - before for name, before, after in zip(PHASES, times, times[1:], strict=False)}
    return {"phases": phases, "graphs": len(graphs.captured) if graphs else 0}
