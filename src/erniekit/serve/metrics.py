"""What the server counts, in Prometheus' text form. Filled by api.py and middleware.py, read at /metrics."""

from __future__ import annotations

from collections import Counter

from erniekit.serve.engines.base import Load
from erniekit.serve.prompt_work import PromptLoad

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.sum += seconds
        self.counts[next((k for k, edge in enumerate(BUCKETS) if seconds <= edge), len(BUCKETS))] += 1

    def lines(self, name: str, about: str) -> list[str]:
        out = [f"# HELP {name} {about}", f"# TYPE {name} histogram"]
        total = 0
        for edge, count in zip((*map(str, BUCKETS), "+Inf"), self.counts):
            total += count
            out.append(f'{name}_bucket{{le="{edge}"}} {total}')
        return [*out, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """All in the event loop's thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.prompt_tokens = self.generated_tokens = 0
        self.disconnects = 0
        self.first_token, self.duration = Histogram(), Histogram()

    def text(self, load: Load, prompts: PromptLoad | None = None, healthy: bool | None = None, lag: float = 0) -> str:
        prompts = prompts or PromptLoad()
        out = ["# HELP erniekit_requests_total Requests answered.", "# TYPE erniekit_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            out.append(f'erniekit_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, kind, about, value in (
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "counter", "Tokens of answers.", self.generated_tokens),
            ("disconnects_total", "counter", "Clients gone before their answer ended.", self.disconnects),
            ("engine_steps_total", "counter", "Steps of the engine.", load.steps),
            ("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.", load.prefix_queries),
            ("prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.", load.prefix_hits),
            ("evictions_total", "counter", "Sequences preempted for lack of cache.", load.evicted),
            ("preemptions_total", "counter", "Sequences put back for other clients or requests.", load.preempted),
            ("proposed_tokens_total", "counter", "Tokens proposed by the MTP layer and verified.", load.proposed),
            ("accepted_tokens_total", "counter", "Proposed tokens that were accepted.", load.proposals_held),
            ("acceptance_ratio", "gauge", "Accepted share of proposed tokens; 0 without any.", load.acceptance),
            ("requests_running", "gauge", "Sequences being computed.", load.running),
            ("requests_waiting", "gauge", "Sequences in the queue.", load.waiting),
            ("cache_used_ratio", "gauge", "Share of the cache's blocks in use.", round(load.cache_used, 6)),
            ("vision_cache_bytes", "gauge", "Bytes of features of pictures that are kept.", load.features),
            ("vision_looks_total", "counter", "Pictures and pairs of frames computed.", load.looks),
            ("prompts_running", "gauge", "Prompts being rendered, tokenised or their media decoded.", prompts.running),
            ("prompts_waiting", "gauge", "Prompts that wait for that.", prompts.waiting),
            ("prompt_threads_lost", "gauge", "Threads beyond the deadline of their prompt.", prompts.lost),
            ("prompts_abandoned_total", "counter", "Prompts not ready at their deadline.", prompts.abandoned),
            ("event_loop_lag_seconds", "gauge", "Worst delay of the event loop, last 10 s.", round(lag, 3)),
            ("healthy", "gauge", "1 while it can answer.", int(load.healthy if healthy is None else healthy)),
        ):
            out += [f"# HELP erniekit_{name} {about}", f"# TYPE erniekit_{name} {kind}", f"erniekit_{name} {value}"]
        out += self.first_token.lines("erniekit_first_token_seconds", "From a request to its first token.")
        out += self.duration.lines("erniekit_request_seconds", "From a request to the end of its answer.")
        return "\n".join(out) + "\n"
