"""Readers of request traces: each turns one published format into `reuse.trace` turns."""

from backhaul.benchmarks.traces.faults import Reason, TraceError
from backhaul.benchmarks.traces.reader import FORMATS, Trace, open_trace

__all__ = ["FORMATS", "Reason", "Trace", "TraceError", "open_trace"]
