"""Runs the notebooks from top to bottom: `python -m stages.workshop.notebooks [01 ...]`."""

import sys
import time

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

import stages

ROOT = stages.STAGES_DIR.parent
QUIET = ["--IPKernelApp.log_level=ERROR"]  # else every kernel warns that it talks over this machine's own network


def main(numbers: list[str]) -> int:
    """Runs all notebooks, or those whose names begin with one of the numbers; the exit code is 1 when one fails."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    chosen = [p for p in paths if not numbers or p.name[:2] in numbers]
    if not chosen:
        print(f"no notebook {numbers or ''}; there are: {[p.name for p in paths]}")
        return 1
    failed = []
    for path in chosen:
        print(f"{path.name} ...", end=" ", flush=True)
        begin = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        where = {"metadata": {"path": str(ROOT)}}
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where, extra_arguments=QUIET)
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"failed after {time.perf_counter() - begin:.1f} s\n{error}")
            failed.append(path.name)
        else:
            print(f"ok, {time.perf_counter() - begin:.1f} s")
    print(f"{len(chosen) - len(failed)} of {len(chosen)} notebooks ran through")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
