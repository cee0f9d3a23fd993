"""Pieces that the sampling kernels share: reading logits with their penalties, and stage 01's noise."""

from dataclasses import dataclass

import triton
import triton.language as tl

LN2, LOG2_E = tl.constexpr(0.6931471805599453), tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Sizes:
    """How much of a row the kernels take at once; powers of 2. Tests take small ones, to go every way with few tokens.

    A row's token would depend on them in its last digits, so they are the same for every batch.
    """

    chunk: int = 4096  # tokens that one program weighs, a multiple of stage 01's GROUP
    tile: int = 4096  # tokens that a program of the filter reads at once, the filter's NEIGHBOURS or more
    candidates: int = 2048  # large logits that the filter gathers, at most


SIZES = Sizes()


@triton.jit
def load_penalties(slot, repetition_ptr, presence_ptr, frequency_ptr, history_ptr, stride_history):
    """The slot's (repetition, presence, frequency, is any on, its row of the history)."""
    repetition = tl.load(repetition_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    return repetition, presence, frequency, penalised, history_ptr + slot.to(tl.int64) * stride_history


@triton.jit
def penalise(logits, at, exists, penalties):
    """Logits as they were loaded -> fp32 logits after penalties; NaN stays NaN."""
    repetition, presence, frequency, penalised, history_ptr = penalties
    logits = logits.to(tl.float32)
    if penalised:
        history = tl.load(history_ptr + at, mask=exists, other=0)
        times = (history >> 1).to(tl.float32)  # in the output
        repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        logits = tl.where(history > 0, repeated, logits)
        logits = tl.where(times > 0, logits - (presence + frequency * times), logits)
    return logits


@triton.jit
def load_logits(row_ptr, at, exists, penalties):
    """fp32 logits after penalties. -inf where there is no token; NaN is read as inf: either spoils the row."""
    logits = penalise(tl.load(row_ptr + at, mask=exists, other=float("-inf")), at, exists, penalties)
    return tl.where(logits != logits, float("inf"), logits)


@triton.jit
def cut(logits, token, floor, limit):
    """-inf below the floor, and at the floor from the limit on."""
    if floor > float("-inf"):
        logits = tl.where((logits > floor) | ((logits == floor) & (token < limit)), logits, float("-inf"))
    return logits


@triton.jit
def mix(x):
    """Stage 01's `mix`, on uint32: there >> fills with zeros and * wraps, as the hash wants it."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_keys(seed_low, seed_high, position):
    """The two keys of a row."""
    low, high = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    key = mix(mix(mix(low) ^ high) ^ position.to(tl.uint32))
    return key, mix(key ^ 0x9E3779B9)


@triton.jit
def log2(x, ASM: tl.constexpr):
    """The GPU's own base-2 logarithm: one instruction, off by 2**-22.6 at most between 1/2 and 2, relatively elsewhere.

    `ASM` is false where there is no such instruction (the interpreter).
    """
    if ASM:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def exp2(x, ASM: tl.constexpr):
    """2**x by one instruction, off by 2**-22 relatively; what is below the normal numbers becomes 0."""
    if ASM:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def log_noise(number, key, other, ASM: tl.constexpr):
    """log(e), fp32, for stage 01's draw e from Exp(1) of each number; exact to about 1e-6.

    The bits are stage 01's. u may differ in its last place where halves are rounded.
    """
    bits = mix(mix(number.to(tl.uint32) ^ key) ^ other)
    u = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    # e = -log(1 - u). A small u wins the race, and 1 - u would lose its digits: there the series u + u^2/2 + u^3/3 ...
    series = 1 / 6 + u * (1 / 7)
    series = 1 / 4 + u * (1 / 5 + u * series)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * series)))
    e = tl.where(u < 0.125, series, -LN2 * log2(1.0 - u, ASM))
    return LN2 * log2(e, ASM)
