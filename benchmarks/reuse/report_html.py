"""The report as one HTML file: styles and plots inside, nothing fetched, no script."""

from __future__ import annotations

import jinja2
from markupsafe import Markup

from backhaul.benchmarks.reuse.report_parts import Report

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ report.title }}</title>
<style>
body { font: 15px/1.45 sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: #1c2730; }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #d8dee3; text-align: left;
         vertical-align: top }
th { background: #eef2f5; position: sticky; top: 0 }
tbody tr:hover { background: #f6f8fa }
figure { display: inline-block; margin: .5rem; width: 36rem; max-width: 100% }
nav a { margin-right: .8rem }
</style>
</head>
<body>
{%- macro table(t) %}
<div class="wide"><table>
<thead><tr>{% for cell in t.header %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in t.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{%- endmacro %}
<h1>{{ report.title }}</h1>
{% for line in report.summary %}<p>{{ line }}</p>
{% endfor %}
<nav aria-label="Questions">{% for a in report.answers %}
<a href="#q{{ a.question.number }}">{{ a.question.number }}</a>{% endfor %}</nav>
{{ table(report.runs) }}
<h2>What it brings, honestly</h2>
{% if report.remarks %}<ul>{% for line in report.remarks %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}{{ table(report.accounting) }}
{% for chart in report.charts %}<figure role="img" aria-label="{{ chart.title }}">
{{ svg(chart.svg) }}</figure>
{% endfor %}
{% for a in report.answers %}
<h2 id="q{{ a.question.number }}">{{ a.question.number }}. {{ a.question.text }}</h2>
{% if a.question.note %}<p>{{ a.question.note }}</p>{% endif %}
{{ table(a.table) }}
{% endfor %}
</body>
</html>
"""


def render_html(report: Report) -> str:
    """Lay the report out. Text is escaped; plots are our own SVG."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE).render(report=report, svg=Markup)
