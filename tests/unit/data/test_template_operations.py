"""What a template puts together is bounded before it is made."""

from __future__ import annotations

import time

import jinja2
import pytest

from erniekit.data.compiled_template import compiled
from support.clock import within

SQUARED = "{% set ns = namespace(s=99999999999) %}{% for i in range(40) %}{% set ns.s = ns.s * ns.s %}{% endfor %}x"
DOUBLED = "{{% set ns = namespace(s='ab') %}}{{% for i in range(40) %}}{{% set ns.s = {} %}}{{% endfor %}}x"
BIG = "3000000000"


@pytest.mark.parametrize(
    "source",
    [
        SQUARED,
        DOUBLED.format("ns.s ~ ns.s"),
        DOUBLED.format("ns.s + ns.s"),
        DOUBLED.format("ns.s.replace('a', ns.s)"),
        DOUBLED.format("ns.s | replace('a', ns.s)"),
        DOUBLED.format("ns.s.join([ns.s, ns.s, ns.s])"),
        DOUBLED.format("[ns.s, ns.s, ns.s] | join(ns.s)"),
        f'{{{{ ("%{BIG}d" % 1) | length }}}}',
        f'{{{{ ("%*d" % ({BIG}, 1)) | length }}}}',
        f'{{{{ "a".ljust({BIG}) | length }}}}',
        f'{{{{ "a" | center({BIG}) | length }}}}',
        f'{{{{ "{{:{BIG}}}".format(1) | length }}}}',
        f'{{{{ "%{BIG}d" | format(1) | length }}}}',
        f'{{{{ "a" * {BIG} }}}}',
        "{{ ('a\n' * 500000) | indent(1000000) }}",
        "{{ lipsum(n=3000000) }}",
    ],
)
def test_what_would_become_too_large_is_refused_at_once(source: str):
    began = time.process_time()
    with pytest.raises(jinja2.TemplateError):
        compiled(source).plain.render(messages=[])
    assert within(time.process_time() - began, 2)


def test_what_templates_do_every_day_is_as_ever():
    source = (
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m.content | trim }}{% endfor %}"
        "{{ '%s-%05d' % ('a', 7) }} {{ '-' * 3 }} {{ 'a,b'.split(',') | join('; ') }} {{ 'x'.replace('x', 'yz') }} "
        "{{ 'a\nb' | indent(2) }} {{ '{:>4}'.format(3) }} {{ 3 * 4 + 2 ** 5 }} {{ [1] + [2] }} {{ 'ab' | center(6) }}|"
    )
    said = compiled(source).plain.render(messages=[{"role": "user", "content": " hi "}])
    assert said == "<|user|>hia-00007 --- a; b yz a\n  b    3 44 [1, 2]   ab  |"
