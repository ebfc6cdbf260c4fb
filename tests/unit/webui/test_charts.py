"""The pictures of runs: what is drawn, what is left out, and that nothing a run says becomes markup."""

from __future__ import annotations

from erniekit.webui.charts import COLOURS, compare_charts, empty, run_charts
from erniekit.webui.runs import MetricSeries

TITLES = {"loss": "Loss", "learning_rate": "Rate", "tokens_per_second": "Speed"}
WORDS = ("mean", "each step", "eval loss")


def series(count: int) -> MetricSeries:
    return MetricSeries(list(range(1, count + 1)), [1 / n for n in range(1, count + 1)])


def test_a_run_has_a_chart_for_each_metric_it_has_logged() -> None:
    drawn = run_charts({"loss": series(5), "tokens_per_second": series(5)}, TITLES, "waiting", WORDS)
    assert drawn.count("<figure") == 2
    assert "Loss" in drawn
    assert "Rate" not in drawn


def test_a_run_without_metrics_says_that_they_will_come() -> None:
    assert "waiting" in run_charts({}, TITLES, "waiting", WORDS)


def test_a_long_loss_is_drawn_as_its_mean_over_its_steps() -> None:
    drawn = run_charts({"loss": series(50)}, TITLES, "waiting", WORDS)
    assert "mean" in drawn
    assert "each step" in drawn


def test_the_loss_of_evaluations_is_drawn_beside_that_of_training() -> None:
    drawn = run_charts({"loss": series(5), "eval_loss": series(2)}, TITLES, "waiting", WORDS)
    assert drawn.count("<figure") == 1
    assert "eval loss" in drawn


def test_a_run_keeps_its_colour_in_every_chart() -> None:
    runs = {f"run{n}": {"loss": series(4), "learning_rate": series(4)} for n in range(COLOURS + 1)}
    drawn = compare_charts(runs, TITLES, "nothing")
    for figure in drawn.split("<figure")[1:]:
        for n in range(COLOURS + 1):
            assert f'<i class="key s{n % COLOURS + 1}"></i>run{n}<' in figure


def test_names_and_texts_are_escaped() -> None:
    drawn = compare_charts({"<b>a</b>": {"loss": series(3)}, "c": {"loss": series(3)}}, TITLES, "nothing")
    assert "<b>a" not in drawn
    assert empty("<img>") == '<div class="ek-empty">&lt;img&gt;</div>'
