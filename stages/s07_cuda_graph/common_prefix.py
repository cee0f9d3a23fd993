"""What the rows of a decode step begin with: blocks that all of their tables have, as behind one long prompt."""

from __future__ import annotations

from stages.s04_continuous_batching.plan import Plan
from stages.s07_cuda_graph.steady import GroupPlan

LEAST_ROWS = 17  # fewer have kernels of their own (`few_rows.py`)
LEAST_KEYS, MANY_ROWS = 512, 48  # what fewer keys would save, a launch more takes; with fewer rows, in proportion more


def common_blocks(plan: Plan, block_size: int) -> int:
    """How many blocks a decode step may read once for all rows; 0 where that does not pay.

    A group is asked once: its tables only grow, and what its rows shared in its first step they share in all others.
    """
    if plan.num_tokens < LEAST_ROWS:
        return 0
    group = plan.group if isinstance(plan, GroupPlan) else None
    if group is not None and group.common is not None:
        return group.common
    spans = [row.span for row in plan.rows]
    blocks = common_lead([span.block_table for span in spans], [span.end for span in spans], block_size)
    pays = blocks * block_size * min(plan.num_tokens, MANY_ROWS) >= LEAST_KEYS * MANY_ROWS
    common = blocks if pays else 0
    if group is not None:
        group.common = common
    return common


def common_lead(tables: list[list[int]], lengths: list[int], block_size: int) -> int:
    """The leading blocks that all tables have in common and no row still writes to: not the one of its newest token.

    As with words in a dictionary: what the first and the last in order have in common, all in between have.
    """
    most = (min(lengths) - 1) // block_size
    first, last = min(tables), max(tables)
    return next((number for number in range(most) if first[number] != last[number]), most)
