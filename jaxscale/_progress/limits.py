"""From where on `check` warns."""

# From which recent share of skipped steps, and from which share of spikes.
OFTEN = 0.05
# The recent share is a mean over about so many steps. After fewer it counts for less.
MEMORY = 1000.0

# From how many steps in a row with a bad loss. No search for a scale makes one bad.
MANY_BAD_LOSSES = 10

# After how many steps of an optimizer its moments are no longer 0, unless all gradients were.
MANY_ZEROS = 50

# From how many falls without a growth between them, and below which scale. On the runs in
# `tests/policies/traces`, which are healthy, the counter reaches 3 at most. Where the scale keeps
# falling it reaches 6 and more (`tests/step/test_decay.py`). Most policies start from 2**15, so
# that is not low.
MANY_FALLS = 6
LOW_SCALE = 2.0**15

# The gradients fill float16's range, up to 2**16, if they are scaled to at least this. A norm may
# be larger than the largest element, and the last step smaller than the worst.
FULL_RANGE = 2.0**10

# From which scale, and after how many steps, `check` says that nothing has ever overflowed. The
# default rule stops growing at this scale, which half precision rarely bears.
HIGH_SCALE = 2.0**24
MANY_STEPS = 10_000
