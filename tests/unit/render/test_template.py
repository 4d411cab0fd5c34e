"""Marks in generation-only branches: where they land, what is refused, and that the text stays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.render.moving import NO_MOVING_TEXT
from backhaul.render.reasons import Reason
from backhaul.render.template import MarkedTemplate, Rendering, environment

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "and now?"},
]
LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def plain(source: str, **variables: Any) -> str:
    return environment().from_string(source).render(**variables)


def marked(source: str, *, flag: bool = True, **variables: Any) -> Rendering | None:
    """The marked render, after a check that its text is the plain one."""
    values = {"messages": MESSAGES, "add_generation_prompt": flag, **variables}
    rendering = MarkedTemplate(source, environment()).render(**values)
    if rendering is not None:
        assert rendering.text == plain(source, **values)
    return rendering


def suffix(source: str, **variables: Any) -> str:
    rendering = marked(source, **variables)
    assert rendering is not None
    assert rendering.u_end is not None
    return rendering.text[rendering.u_end :]


@pytest.mark.parametrize(
    "guard",
    [
        "{% if add_generation_prompt %}<asst>{% endif %}",
        "{% if add_generation_prompt and not quiet %}<asst>{% endif %}",
        "{% if add_generation_prompt is true %}<asst>{% endif %}",
        "{% if add_generation_prompt == true %}<asst>{% endif %}",
        "{% if add_generation_prompt|default(false) %}<asst>{% endif %}",
        "{% if not add_generation_prompt %}{% else %}<asst>{% endif %}",
        "{% if quiet %}{% elif add_generation_prompt %}<asst>{% endif %}",
        "{{ '<asst>' if add_generation_prompt }}",
        "{{ '<asst>' if add_generation_prompt else '' }}",
        "{{ '' if not add_generation_prompt else '<asst>' }}",
        "{% set go = add_generation_prompt %}{% if go %}<asst>{% endif %}",
        "{% set go = add_generation_prompt and not quiet %}{% if go %}<asst>{% endif %}",
        "{% set go = add_generation_prompt and go is not defined %}{% if go %}<asst>{% endif %}",
        "{% if add_generation_prompt %}{{ '<asst>' }}{% set a = 1 %}{% endif %}",
        "{% if add_generation_prompt %}{% if quiet %}x{% else %}<asst>{% endif %}{% endif %}",
        "{% if add_generation_prompt %}{{ '<as' ~ 'st>' if add_generation_prompt }}{% endif %}",
        "{% if quiet or not add_generation_prompt %}{% else %}<asst>{% endif %}",
    ],
)
def test_a_guard_is_found(guard: str) -> None:
    assert suffix(LOOP + guard) == "<asst>"
    assert suffix(LOOP + guard, flag=False) == ""


@pytest.mark.parametrize(
    "default",
    [
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
        "{% endif %}",
        "{% if add_generation_prompt is not defined %}{% set add_generation_prompt = true %}"
        "{% endif %}",
        "{% set add_generation_prompt = add_generation_prompt or false %}",
        "{% set add_generation_prompt = add_generation_prompt|default(false) %}",
        "{% set add_generation_prompt = add_generation_prompt if add_generation_prompt is defined "
        "else true %}",
        "{% if quiet %}{% set add_generation_prompt = false %}{% endif %}",
    ],
)
def test_defaults_of_the_flag_are_no_mentions(default: str) -> None:
    guard = "{% if add_generation_prompt %}<asst>{% endif %}"
    assert suffix(default + LOOP + guard) == "<asst>"


def test_a_chain_of_aliases_is_followed_once_each() -> None:
    chain = "{% set a0 = add_generation_prompt %}" + "".join(
        f"{{% set a{i + 1} = a{i} and (a{i} or a{i}) %}}" for i in range(60)
    )
    assert suffix(chain + LOOP + "{% if a60 %}<asst>{% endif %}") == "<asst>"


def test_a_guard_inside_the_loop_marks_the_last_message() -> None:
    source = (
        "{% for m in messages %}[{{ m.content }}]"
        "{% if loop.last and add_generation_prompt %}<asst>{% endif %}{% endfor %}"
    )
    assert suffix(source) == "<asst>"


def test_the_first_of_several_guards_counts() -> None:
    source = (
        LOOP + "{% if add_generation_prompt %}<a>{% endif %}{{ '<b>' if add_generation_prompt }}"
    )
    assert suffix(source) == "<a><b>"


def test_a_guard_that_does_not_run_leaves_the_whole_prompt() -> None:
    source = LOOP + "{% if add_generation_prompt and not tool %}<asst>{% endif %}"
    assert suffix(source, tool=True) == ""


def test_an_arm_for_the_flag_being_off_is_not_marked() -> None:
    source = LOOP + "{% if add_generation_prompt %}<asst>{% else %}<eos>{% endif %}"
    assert suffix(source) == "<asst>"
    assert suffix(source, flag=False) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ '<a>' if add_generation_prompt }}{% endmacro %}{{ m() }}",
        "{% macro m(go) %}{% if go %}<a>{% endif %}{% endmacro %}{{ m(add_generation_prompt) }}",
        "{% set s %}{% if add_generation_prompt %}<a>{% endif %}{% endset %}{{ s }}",
        "{% filter upper %}{% if add_generation_prompt %}<a>{% endif %}{% endfilter %}",
        "{% set ns = namespace(go=add_generation_prompt) %}{% if ns.go %}<a>{% endif %}",
        "{% set s = '<a>' if add_generation_prompt else '' %}{{ s }}",
        "{{ 'x' + ('<a>' if add_generation_prompt else '') }}",
        "{{ 'x' ~ add_generation_prompt }}",
        "{{ add_generation_prompt }}",
        "{% if add_generation_prompt or thinking %}<a>{% endif %}",
        "{% if thinking and (add_generation_prompt or x) %}<a>{% endif %}",
        "{% if add_generation_prompt %}{% set s = '<a>' %}{% endif %}{{ s }}",
        "{% set ns = namespace(s='') %}{% if add_generation_prompt %}{% set ns.s = '<a>' %}"
        "{% endif %}{{ ns.s }}",
        "{% if not add_generation_prompt %}{% set s = 1 %}{% endif %}"
        "{% if s %}{% else %}<a>{% endif %}",
        "{% for m in messages if add_generation_prompt %}<a>{% endfor %}",
        "{% set add_generation_prompt = true %}{% if add_generation_prompt %}<a>{% endif %}",
        "{% set add_generation_prompt = not add_generation_prompt %}"
        "{% if not add_generation_prompt %}<a>{% endif %}",
        "{% generation %}{{ '<a>' if add_generation_prompt }}{% endgeneration %}",
        "{% include add_generation_prompt %}",
        "{% for m in messages recursive %}{{ '<a>' if add_generation_prompt }}{% endfor %}",
        "{% for m in messages %}{% if add_generation_prompt or loop.first %}<a>{% endif %}"
        "{% endfor %}",
        "{% for m in messages %}{% if add_generation_prompt or x or not loop.last %}{% else %}<a>"
        "{% endif %}{{ '<b>' if loop.last and add_generation_prompt or x }}{% endfor %}",
        "{% if not loop or add_generation_prompt %}<a>{% endif %}",
    ],
)
def test_what_cannot_be_known_is_refused(source: str) -> None:
    template = MarkedTemplate(LOOP + source, environment())
    assert template.reason is Reason.REFUSED
    assert template.guards.refusals
    assert template.render(messages=MESSAGES, add_generation_prompt=True) is None


GUARD = "{{ '<asst>' if add_generation_prompt }}"
INSIDE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}TEXT{% endfor %}" + GUARD
HISTORY = (
    "{% if (loop.last and add_generation_prompt) or not loop.last %}<end>{% endif %}",
    "{% if add_generation_prompt or not loop.last %}{% set e = '<end>' %}{{ e }}{% endif %}",
    "{% if loop.last and not add_generation_prompt %}{% else %}<end>{% endif %}",
    "{% if m.role == 'user' and (add_generation_prompt or not loop.last) %}{% endif %}"
    "{% if not loop.last %}<end>{% elif add_generation_prompt %}<end>{% endif %}",
    "{{ '<end>' if add_generation_prompt or not loop.last }}",
    "{{ '' if loop.last and not add_generation_prompt else '<end>' }}",
)


@pytest.mark.parametrize("text", [one for one in HISTORY if "elif" not in one])
def test_what_only_a_last_pass_without_the_flag_lacks_is_history(text: str) -> None:
    source = INSIDE.replace("TEXT", text)
    assert MarkedTemplate(source, environment()).guards.moving == NO_MOVING_TEXT
    assert suffix(source) == "<asst>"
    rendering = marked(source)
    assert rendering is not None and rendering.text.endswith("<end><asst>")


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(HISTORY), st.booleans())
def test_history_is_never_put_too_late(text: str, x: bool) -> None:
    source = INSIDE.replace("TEXT", text)
    more = [*MESSAGES, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}]
    rendering = marked(source, x=x)
    assert rendering is not None and rendering.u_end is not None
    following = plain(source, messages=more, add_generation_prompt=True, x=x)
    assert following.startswith(rendering.text[: rendering.u_end])


def test_a_name_that_is_set_again_elsewhere_is_not_refused() -> None:
    source = (
        "{% for m in messages %}{% set c = m.content %}{{ c }}{% endfor %}"
        "{% if add_generation_prompt %}{% set c = '<asst>' %}{{ c }}{% endif %}"
    )
    assert suffix(source) == "<asst>"


@pytest.mark.parametrize(
    "guard",
    ["{{ '<b>' if add_generation_prompt }}", "{% if add_generation_prompt %}<b>{% endif %}"],
)
def test_a_mark_that_is_lost_on_the_way_makes_it_unknown(guard: str) -> None:
    """Escaped output is made anew."""
    source = "{% autoescape true %}a" + guard + "{% endautoescape %}"
    template = MarkedTemplate(source, environment())
    assert template.reason is None
    rendering = template.render(add_generation_prompt=True)
    text = plain(source, add_generation_prompt=True)
    assert rendering == Rendering(text, None, Reason.REFUSED)


@pytest.mark.parametrize(
    "changes",
    [{"finalize": lambda value: value}, {"autoescape": True}],
    ids=["finalize", "autoescape"],
)
def test_output_that_the_environment_makes_anew_is_refused(changes: dict[str, Any]) -> None:
    made = environment()
    for name, value in changes.items():
        setattr(made, name, value)
    template = MarkedTemplate(LOOP + "{{ '<b>' if add_generation_prompt }}", made)
    assert template.reason is Reason.REFUSED
    assert template.render(messages=MESSAGES, add_generation_prompt=True) is None


def test_without_a_guard_nothing_is_claimed() -> None:
    template = MarkedTemplate(LOOP + "<think></think>", environment())
    assert template.reason is Reason.UNGUARDED
    assert template.render(messages=MESSAGES) is None


MOVING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
    "{% if loop.index0 == ns.last and effort %}{effort}{% endif %}"
    "{% else %}{{ m.content }}{% if loop.last %}<eos>{% endif %}{% endif %}{% endfor %}"
    "{{ '<asst>' if add_generation_prompt }}"
)


def test_control_text_in_the_last_user_message_makes_it_unknown() -> None:
    assert suffix(MOVING, effort=False) == "<asst>"
    rendering = marked(MOVING, effort=True)
    assert rendering is not None
    assert rendering.u_end is None
    assert rendering.reason is Reason.MOVING_CONTROL_TEXT


def test_control_text_after_the_loop_makes_it_unknown() -> None:
    source = (
        "{% set ns = namespace(tool=false) %}" + LOOP + "{% if ns.tool %}</tools>{% endif %}"
        "{% set kind = response_format %}{% if kind == 'json' %}Answer in JSON.{% endif %}"
        "{{ '<asst>' if add_generation_prompt }}"
    )
    assert suffix(source) == "<asst>"
    rendering = marked(source, response_format="json")
    assert rendering is not None
    assert rendering.reason is Reason.MOVING_CONTROL_TEXT


AFTER = LOOP + "TEXT" + GUARD


@pytest.mark.parametrize("whole", [INSIDE, "{% if messages %}" + INSIDE + "{% endif %}"])
@pytest.mark.parametrize(
    "text",
    [
        "{{ effort if loop.last }}",
        "{{ effort if m.role == 'user' and loop.last else '' }}",
        "{{ '' if not loop.last else effort }}",
        "{{ (effort if effort else '') if loop.last }}",
        "{% if loop.last %}{{ effort if effort }}{% endif %}",
        "{% if m.role == 'user' %}{{ effort if loop.revindex == 1 and effort }}{% endif %}",
        "{% if effort and loop.last %}{effort}{% endif %}",
        "{% if loop.last %}{% if effort %}{effort}{% endif %}{% endif %}",
        "{% if loop.last %}{% for e in effort %}{{ e }}{% endfor %}{% endif %}",
        "{% if not loop.last %}{% elif effort %}{effort}{% endif %}",
        "{% with e = effort %}{{ e if loop.last and e }}{% endwith %}",
        "{% generation %}{% if loop.last and effort %}x{% endif %}{% endgeneration %}",
        "{% if loop.last %}[{{ effort }}{% else %}[{% endif %}",
        "{% if loop.last %}[{{ effort }}{% else %}{{ effort }}[{% endif %}",
        "{% if loop.last %}[{{ loop.last }}{% else %}[{{ loop.last }}]{% endif %}",
        "{% if loop.last %}{{ '[' + effort }}{% elif x %}{{ '[' + effort + ']' }}{% endif %}",
        "{% if loop.last %}{{ m.role + effort }}{% else %}{{ m.role + effort + effort }}"
        "{% endif %}",
        "{% if loop.last %}[{% else %}{% set e = x %}[{% endif %}",
    ],
)
def test_text_of_the_last_message_makes_it_unknown(whole: str, text: str) -> None:
    """In whatever form it is written."""
    rendering = marked(whole.replace("TEXT", text), effort="low")
    assert rendering is not None
    assert (rendering.u_end, rendering.reason) == (None, Reason.MOVING_CONTROL_TEXT)


@pytest.mark.parametrize(
    "text",
    [
        "{{ effort if loop.last and effort }}",
        "{{ effort if effort and m.role == 'user' and loop.last else '' }}",
        "{% if loop.last %}{{ 'x' if effort else '' }}{% endif %}",
        "{% if effort and loop.last %}{effort}{% endif %}",
        "{% if loop.last %}{% if effort %}{effort}{% endif %}{% endif %}",
        "{% if loop.last %}{% for e in effort %}{{ e }}{% endfor %}{% endif %}",
    ],
)
def test_text_of_the_last_message_that_is_not_written_does_not(text: str) -> None:
    assert suffix(INSIDE.replace("TEXT", text), effort="") == "<asst>"


@pytest.mark.parametrize(
    "text",
    [
        "{% if not loop.last %},{% endif %}",
        "{{ ',' if not loop.last }}",
        "{% if loop.first %}first{% endif %}",
        "{{ 'x' if loop.index0 == 0 }}",
        "{% if loop.last and m.role == 'assistant' %}<eos>{% endif %}",
        "{{ '<eos>' if loop.last and m.role == 'tool' }}",
        "{% if loop.last or m.end %}{{ '' if loop.last }}{% endif %}",
        "{% if loop.last %}{{ raise_exception('no') if effort }}{% endif %}",
        "{% if not loop.last or m.role == 'user' %}<end>{% endif %}",
        "{% if m.role == 'user' or loop.last %}<end>{% endif %}",
        "{% if loop.last %}{{ '[' + m.role }}{% else %}{{ '[' + m.role + ']' }}{% endif %}",
        "{% if loop.last %}[{{ x }}{% else %}[{{ x }}]{% endif %}",
        "{% if m.role == 'user' and loop.last %}[{% else %}{{ '[x' }}{{ x }}{% endif %}",
        "{% if not loop.last %}[{{ m.role }}]{% else %}{{ '[' + m.role }}{% endif %}",
    ],
)
def test_what_every_users_message_has_or_none_is_not_moving(text: str) -> None:
    assert (
        MarkedTemplate(INSIDE.replace("TEXT", text), environment()).guards.moving == NO_MOVING_TEXT
    )
    assert suffix(INSIDE.replace("TEXT", text)) == "<asst>"


@pytest.mark.parametrize(
    "whole",
    [
        AFTER,
        "{% if messages %}" + AFTER + "{% endif %}",
        "{% if messages %}" + LOOP + "{% else %}none{% endif %}TEXT" + GUARD,
        "{% with %}" + AFTER + "{% endwith %}",
        "{% set ns = namespace(n=0) %}"
        + AFTER
        + "{% for m in messages %}{% set ns.n = 1 %}{% endfor %}",
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        "{{ 'JSON' if kind }}",
        "{{ '' if not kind else ('JSON' if kind else '') }}",
        "{% if kind %}JSON{% endif %}",
        "{% for t in kind %}{{ t }}{% endfor %}",
        "{% set k = kind %}{{ 'a' ~ k if k }}",
    ],
)
def test_control_text_after_the_loop_in_any_form(whole: str, text: str) -> None:
    source = whole.replace("TEXT", text)
    assert suffix(source, kind="") == "<asst>"
    rendering = marked(source, kind="json")
    assert rendering is not None
    assert rendering.reason is Reason.MOVING_CONTROL_TEXT


@pytest.mark.parametrize("text", ["end", "{{ x }}", "{{ 'a' if messages else 'b' }}"])
@pytest.mark.parametrize("whole", [AFTER, "{% if messages %}" + AFTER + "{% endif %}"])
def test_text_that_always_follows_the_loop_is_trailing(whole: str, text: str) -> None:
    moving = MarkedTemplate(whole.replace("TEXT", text), environment()).guards.moving
    assert moving.trailing and not moving.branches and not moving.inline
    off = "{{ '<eos>' if not add_generation_prompt else '<asst>' }}"
    assert MarkedTemplate(LOOP + off, environment()).guards.moving == NO_MOVING_TEXT


def test_position_in_an_inner_loop_or_another_role_is_not_moving() -> None:
    template = MarkedTemplate(
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% for part in m.content %}{{ part }}{% if not loop.last %}, {% endif %}{% endfor %}"
        "{% elif m.role == 'tool' %}{% if loop.last %}</tools>{% endif %}{% endif %}{% endfor %}"
        "{{ '<asst>' if add_generation_prompt }}",
        environment(),
    )
    assert template.guards.moving == NO_MOVING_TEXT


def test_what_the_template_raises_is_raised() -> None:
    template = MarkedTemplate(
        "{{ raise_exception('no') }}{{ 'a' if add_generation_prompt }}", environment()
    )
    with pytest.raises(Exception, match="no"):
        template.render(add_generation_prompt=True)


LAST = st.sampled_from(["loop.last", "m is eq(messages[-1]) and loop.last", "loop.last and x"])
WRITTEN = st.sampled_from(
    [
        "{% if TEST %}E{% endif %}",
        "{{ 'E' if TEST }}",
        "{{ '' if not (TEST) else 'E' }}",
        "{% if x %}{{ 'E' if TEST }}{% endif %}",
        "{% if TEST %}{% if x %}E{% endif %}{% endif %}",
        "{% if not (TEST) %}{% else %}{{ 'E' }}{% endif %}",
        "{% if TEST %}E{{ m.content }}{% else %}E{{ m.content }}F{% endif %}",
        "{% if TEST %}{{ 'E' + m.role }}{% elif x %}{{ 'E' + m.content }}{% else %}E{% endif %}",
    ]
)


@settings(deadline=None, max_examples=50)
@given(WRITTEN, LAST, st.booleans())
def test_known_ends_are_prefixes_of_the_next_turn(written: str, last: str, x: bool) -> None:
    """The next turn adds a reply and a question; what it changed before that was moving."""
    source = INSIDE.replace("TEXT", written.replace("TEST", last))
    rendering = marked(source, x=x)
    assert rendering is not None
    more = [*MESSAGES, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}]
    following = plain(source, messages=more, add_generation_prompt=True, x=x)
    if rendering.u_end is not None:
        assert following.startswith(rendering.text[: rendering.u_end])


PIECES = st.sampled_from(
    [
        "text ",
        "{{ x }}",
        "{% if messages %}yes{% endif %}",
        "{% if not add_generation_prompt and false %}never{% endif %}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% set a = x %}{{ a }}",
        "{% macro f(v) %}[{{ v }}]{% endmacro %}{{ f(x) }}",
        "{% filter upper %}abc{{ x }}{% endfilter %}",
    ]
)
GUARDED = st.sampled_from(
    [
        "{% if add_generation_prompt %}<g>{{ x }}{% endif %}",
        "{{ '<g>' if add_generation_prompt }}",
        "{% if add_generation_prompt and x %}<g>{% endif %}",
        "{% if x %}{% if add_generation_prompt %}<g>{% endif %}{% endif %}",
        "{% if not add_generation_prompt %}{% else %}<g>{% endif %}",
    ]
)


@settings(deadline=None, max_examples=50)
@given(st.lists(PIECES, max_size=6), st.lists(GUARDED, min_size=1, max_size=3), st.booleans())
def test_the_mark_is_where_a_render_without_the_flag_ends(
    history: list[str], guards: list[str], x: bool
) -> None:
    source = "".join([*history, *guards])
    rendering = marked(source, x=x)
    assert rendering is not None
    assert rendering.u_end is not None
    without = plain(source, messages=MESSAGES, add_generation_prompt=False, x=x)
    assert rendering.text[: rendering.u_end] == without


@settings(deadline=None, max_examples=50)
@given(st.lists(PIECES | GUARDED, max_size=8), st.booleans())
def test_guards_anywhere_never_put_it_too_late(pieces: list[str], x: bool) -> None:
    source = "".join(pieces)
    rendering = marked(source, x=x)
    if rendering is not None and rendering.u_end is not None:
        without = plain(source, messages=MESSAGES, add_generation_prompt=False, x=x)
        assert without.startswith(rendering.text[: rendering.u_end])
