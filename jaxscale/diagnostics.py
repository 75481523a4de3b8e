"""What happened to the numbers: where they overflowed, and where they were lost."""

from ._diagnose_findings import Nonfinite as Nonfinite
from ._diagnose_findings import TraceReport as TraceReport
from ._diagnose_findings import Underflow as Underflow
from ._diagnose_trace import trace as trace
