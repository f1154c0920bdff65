"""For the tests of your own pipelines: run a computation or a pipeline in memory, drive clock and watermark
by hand, crash it anywhere. Neither Spark nor Java is needed, and nothing is written to disk.

>>> from penstock import Computation, Value, testing
>>> class CountPerSecond(Computation):
...     outputs = {"out": {"second": "bigint", "n": "bigint"}}
...     counts = Value(dict[int, int])
...
...     def process_record(self, record, ctx):
...         second = record.ts // 1000
...         ctx.state.counts[second] = ctx.state.counts.get(second, 0) + 1
...         ctx.set_timer(str(second), (second + 1) * 1000)
...
...     def process_timer(self, timer, ctx):
...         second = int(timer.tag)
...         ctx.produce({"second": second, "n": ctx.state.counts.pop(second)})
>>> run = testing.Run(CountPerSecond())
>>> run.record("cats", 1200)
>>> run.record("cats", 1900)
>>> run.state("cats").counts
{1: 2}
>>> run.outputs("out")
[]
>>> run.advance_watermark(2000)
>>> run.outputs("out")
[{'second': 1, 'n': 2}]

The same script with a crash after every effect, and in other batches:

>>> def script(run):
...     run.record("cats", 1200)
...     run.advance_watermark(2000)
>>> testing.crash_everywhere(CountPerSecond, script).runs > 5
True
>>> testing.cut_everywhere(CountPerSecond, script).runs
7
"""

from __future__ import annotations

from penstock.streams.trial.pipeline import PipelineRun
from penstock.streams.trial.run import OutputsDiffer, Produced, Run, Tried, crash_everywhere, cut_everywhere

__all__ = ["OutputsDiffer", "PipelineRun", "Produced", "Run", "Tried", "crash_everywhere", "cut_everywhere"]
