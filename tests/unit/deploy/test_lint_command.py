"""`backhaul lint-template`: reports, exit codes, and one line for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from store_kit import backhaul

GUARD = "{% if add_generation_prompt %}<asst>{% endif %}"
LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    return backhaul("lint-template", *map(str, arguments))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_good_template(tmp_path: Path) -> None:
    code, out, err = run(write(tmp_path / "t.jinja", LOOP + "\n" + GUARD))
    assert (code, err) == (0, "")
    assert "U_end will be found" in out
    assert "generation-only: add_generation_prompt" in out


def test_everything_is_in_the_json(tmp_path: Path) -> None:
    source = (
        "{{ strftime_now('%d %H:%M') }}\n"
        "{% for m in messages %}{% if m.role == 'user' and loop.last and effort %}low{% endif %}"
        "{% endfor %}\nend\n"
        f"{GUARD}\n{{{{ 'x' ~ add_generation_prompt }}}}"
    )
    code, out, _ = run("--json", write(tmp_path / "t.jinja", source))
    (report,) = json.loads(out)
    assert code == 1
    assert report["reason"] == "refused"
    assert [r["line"] for r in report["guards"]] == [4]
    assert [r["line"] for r in report["refusals"]] == [5]
    assert [r["line"] for r in report["moving"]] == [2]
    assert report["clocks"] == [
        {"line": 1, "message": "strftime_now('%d %H:%M'): nothing after it survives the minute"}
    ]
    assert report["trailing"]


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (
            "{% if loop.last %}{% set c = c ~ effort %}{% endif %}{{ c }}",
            "c is set where loop.last",
        ),
        ("{% if loop.last %}{% set ns.c = effort %}{% endif %}{{ ns.c }}", "ns.c is set where"),
        ("{% if loop.last %}{% set c %}E{% endset %}{% endif %}{{ c }}", "c is set where"),
        ("{% set c = effort if loop.last else '' %}{{ c }}", "c is set from how far"),
        ("{% set end = loop.last %}{% if end %}E{% endif %}", "end is set from how far"),
        ("{{ turn(m, loop.last) }}", "macro turn is told which"),
        ("{{ turn(m, end=loop.index == messages|length) }}", "macro turn is told which"),
        ("{{ turn(m, loop.last) if m.role == 'user' else '' }}", "macro turn is told which"),
        ("{{ m.content ~ ('E' if loop.last) }}", "an expression depends on how far"),
    ],
)
def test_what_may_be_moving_is_told(tmp_path: Path, inside: str, message: str) -> None:
    source = (
        "{% macro turn(m, end=false) %}{{ m.content }}{% if end %}E{% endif %}{% endmacro %}"
        f"{{% set ns = namespace(c='') %}}{{% for m in messages %}}\n{inside}{{% endfor %}}{GUARD}"
    )
    path = write(tmp_path / "t.jinja", source)
    code, out, _ = run("--json", path)
    (report,) = json.loads(out)
    assert (code, report["moving"]) == (0, [])
    (remark,) = report["maybe_moving"]
    assert remark["line"] == 2 and message in remark["message"]
    assert "may be moving: " in run(path)[1]


def test_moving_text_in_an_expression_is_told(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}\n{{ effort if loop.last }}{% endfor %}\n"
        f"{{{{ 'JSON' if response_format }}}}{GUARD}"
    )
    _, out, _ = run("--json", write(tmp_path / "t.jinja", source))
    assert [(r["line"], r["message"].rsplit(": ")[-1]) for r in json.loads(out)[0]["moving"]] == [
        (2, "loop.last"),
        (3, "response_format"),
    ]


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("%d %b %Y", "day"), ("%A, %-d %B", "day"), ("%F", "day"), ("100%%H", "day"),
        ("%H", "hour"), ("%-H", "hour"), ("%-I %p", "hour"), ("%k", "hour"),
        ("%-M", "minute"), ("%R", "minute"), ("%OM", "minute"),
        ("%T", "second"), ("%X", "second"), ("%c", "second"), ("%s", "second"), ("%-S", "second"),
        ("%H:%M:%S.%f", "microsecond"), ("%f %c", "microsecond"),
    ],
)  # fmt: skip
def test_clocks_by_their_finest_part(tmp_path: Path, form: str, part: str) -> None:
    path = write(tmp_path / "t.jinja", f"{{{{ strftime_now('{form}') }}}}{LOOP}{GUARD}")
    (clock,) = json.loads(run("--json", path)[1])[0]["clocks"]
    assert clock["message"].endswith(f"survives the {part}")


def test_without_a_guard(tmp_path: Path) -> None:
    code, out, _ = run(write(tmp_path / "t.jinja", LOOP))
    assert code == 1
    assert "no branch depends on add_generation_prompt" in out


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("chat_template.jinja", GUARD, "chat_template.jinja"),
        ("additional_chat_templates/tool.jinja", GUARD, "tool.jinja"),
        ("tokenizer_config.json", json.dumps({"chat_template": GUARD}), "tokenizer_config.json"),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "tool_use", "template": GUARD}]}),
            "tokenizer_config.json#tool_use",
        ),
    ],
)
def test_a_tokenizers_directory(tmp_path: Path, name: str, text: str, shown: str) -> None:
    write(tmp_path / name, text)
    code, out, _ = run("--json", tmp_path)
    assert code == 0
    assert json.loads(out)[0]["name"].endswith(shown)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, None, "cannot be read"),
        ("t.jinja", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("t.jinja", b"a\n{% if %}", "line 2 is not valid Jinja"),
        ("t.json", b"{", "line 1 is not valid JSON"),
        ("t.json", b"[1]", 'has no "chat_template"'),
        ("t.json", b'{"chat_template": [{"name": 3}]}', 'has no "chat_template"'),
        ("empty/other.txt", b"", "has no chat template"),
        ("deep.jinja", b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}", "nested too deeply"),
        ("big.jinja", b"x" * (4 * 1024 * 1024 + 1), "larger than"),
    ],
)
def test_what_cannot_be_examined_is_one_line(
    tmp_path: Path, name: str | None, content: bytes | None, message: str
) -> None:
    path = tmp_path / (name or "missing.jinja")
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    code, out, err = run(path.parent if name == "empty/other.txt" else path)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
