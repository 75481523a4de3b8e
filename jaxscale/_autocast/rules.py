"""Which rule rewrites an equation, by the name of its primitive."""

from .custom_rules import custom_jvp, custom_vjp
from .frame import Rule
from .higher_order import call, cond, inlined, mapped, remat, scan, while_loop
from .interpreter import SIMPLE_RULES

RULES: dict[str, Rule] = SIMPLE_RULES | {
    "jit": call,
    "pjit": call,
    "closed_call": inlined,
    "core_call": inlined,
    "call": inlined,
    "remat2": remat,
    "checkpoint": remat,
    "remat": remat,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "shard_map": mapped,
    "xla_pmap": mapped,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
