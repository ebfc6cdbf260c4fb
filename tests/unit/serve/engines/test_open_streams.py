"""What an engine knows of requests that have not ended, without going through their sequences."""

from __future__ import annotations

from erniekit.serve.engines.base import GenerationJob, SamplingParams, TokenStream
from erniekit.serve.engines.open_streams import OpenStreams
from erniekit.serve.engines.sequence import RunningSequence, sequences_of


def added(streams: OpenStreams, *models: str) -> list[RunningSequence]:
    stream = TokenStream([GenerationJob((3,), model, SamplingParams(4), frozenset(), 9) for model in models])
    runs = sequences_of(stream)
    streams.add(stream, runs)
    return runs


def test_models_are_used_until_the_last_of_their_sequences_has_ended():
    streams = OpenStreams()
    first, second = added(streams, "a", "b"), added(streams, "a")
    assert streams.models() == {"a", "b"}
    streams.end(first[1])
    streams.end(first[1])  # twice does no harm
    assert streams.models() == {"a"}
    streams.end(first[0])
    assert streams.models() == {"a"}
    streams.end(second[0])
    assert streams.models() == set()


def test_sequences_are_found_by_their_number_while_they_are_open():
    streams = OpenStreams()
    runs = added(streams, "a", "a", "a")
    stream = runs[0].stream
    assert streams.open_runs(stream, 1) == [runs[1]]
    streams.end(runs[1])
    assert (streams.open_runs(stream, 1), streams.open_runs(stream)) == ([], [runs[0], runs[2]])
    assert streams.end_all() == [runs[0], runs[2]]
    assert (streams.open_runs(stream), streams.models()) == ([], set())
