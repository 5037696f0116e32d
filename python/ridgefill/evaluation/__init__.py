"""Quality of fills, measured: text sets, loss, planted facts and statistics. The one place for all of these.

Data passes the modules in this order: `texts` (documents and windows), `prompts` (text with something planted in it), `arms`
(how a prompt is put into the cache), `loss`, `facts` and `tasks` (records of one item), `stats` (intervals and tests over
items), `report` (summaries, criteria, tables); `study` runs them all, and `page` shows the result.
An evaluation fails closed: a missing, double or non-finite value stops it with an EvaluationError.
"""

from .arms import Arm, Engine
from .errors import EvaluationError

__all__ = ["Arm", "Engine", "EvaluationError"]
