"""See what happened: where gradients overflow, what underflows, which loss scale would do."""

from ._diagnose_calibrate import Calibration as Calibration
from ._diagnose_calibrate import calibrate as calibrate
from ._diagnose_findings import TracedNonfinite as TracedNonfinite
from ._diagnose_findings import TracedUnderflow as TracedUnderflow
from ._diagnose_findings import TraceReport as TraceReport
from ._diagnose_histogram import Histogram as Histogram
from ._diagnose_histogram import Shares as Shares
from ._diagnose_histogram import histogram as histogram
from ._diagnose_histogram import leaf_histograms as leaf_histograms
from ._diagnose_histogram import shares as shares
from ._diagnose_history import History as History
from ._diagnose_leaves import LeafCounts as LeafCounts
from ._diagnose_leaves import LeafRow as LeafRow
from ._diagnose_leaves import LeafTable as LeafTable
from ._diagnose_leaves import leaf_counts as leaf_counts
from ._diagnose_leaves import table as table
from ._diagnose_pictures import plot_histogram as plot_histogram
from ._diagnose_pictures import plot_underflow as plot_underflow
from ._diagnose_suggest import Suggestion as Suggestion
from ._diagnose_suggest import suggest_scale as suggest_scale
from ._diagnose_text import text_histogram as text_histogram
from ._diagnose_trace import trace as trace
from ._diagnose_underflow import Underflow as Underflow
from ._diagnose_underflow import underflow as underflow
from ._diagnose_words import to_json as to_json
