"""See what happened: where gradients overflow, what underflows, which loss scale would work."""

from ._calibrate import Calibration as Calibration
from ._calibrate import calibrate as calibrate
from ._histogram import Histogram as Histogram
from ._histogram import Shares as Shares
from ._histogram import histogram as histogram
from ._histogram import leaf_histograms as leaf_histograms
from ._histogram import shares as shares
from ._history import History as History
from ._leaves import LeafCounts as LeafCounts
from ._leaves import LeafRow as LeafRow
from ._leaves import LeafTable as LeafTable
from ._leaves import leaf_counts as leaf_counts
from ._leaves import table as table
from ._pictures import plot_histogram as plot_histogram
from ._pictures import plot_underflow as plot_underflow
from ._suggest import Suggestion as Suggestion
from ._suggest import suggest_scale as suggest_scale
from ._text import text_histogram as text_histogram
from ._text import to_json as to_json
from ._trace.report import TracedNonfinite as TracedNonfinite
from ._trace.report import TracedUnderflow as TracedUnderflow
from ._trace.report import TraceReport as TraceReport
from ._trace.trace import trace as trace
from ._underflow import Underflow as Underflow
from ._underflow import underflow as underflow
