"""The doctor's decisions on plain data."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_kit import make_layout, make_record

from backhaul.deploy.diagnosis import (
    EngineView,
    check_domains,
    check_engine,
    check_prompts,
    check_side_by_side,
    check_store,
)
from backhaul.deploy.domain_rows import differences
from backhaul.deploy.engine_view import parse_metrics
from backhaul.deploy.findings import Finding, Level, worst
from backhaul.deploy.retention import INTERVAL
from backhaul.deploy.transports import check_engine_transports, check_transports
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.layout import GroupKind
from backhaul.protocols.policy import Policy
from backhaul.transfer.base import DomainClient, DomainInfo, StoreStats
from backhaul.transfer.transport_probe import ProbeResult, parse_used

METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",\
mamba_block_size="528",mamba_cache_mode="align",prefix_cache_retention_interval="0"} 1.0
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",le="200.0",model_name="m"} 6.0
vllm:request_prompt_tokens_bucket{engine="0",le="500.0",model_name="m"} 7.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="m"} 10.0
vllm:request_prompt_tokens_bucket{engine="1",le="200.0",model_name="m"} 0.0
vllm:request_prompt_tokens_bucket{engine="1",le="500.0",model_name="m"} 0.0
vllm:request_prompt_tokens_bucket{engine="1",le="+Inf",model_name="m"} 10.0
# TYPE backhaul:info gauge
backhaul:info{domain="0123456789abcdef",policy="both"} 1.0
# TYPE backhaul:transport_ranks gauge
backhaul:transport_ranks{engine="0",transport="cma/memory"} 2.0
backhaul:transport_ranks{engine="1",transport="cma/memory"} 1.0
"""


def info(
    idle_s: float = 0.0, clients: tuple[str, ...] = ("p:worker", "d:worker"), **fields: Any
) -> DomainInfo:
    record = msgspec.structs.replace(make_record("m"), **fields)
    return DomainInfo(
        record.domain_id, record, tuple(DomainClient(c, 0.0) for c in clients), idle_s, 0, {}, 0, 0
    )


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {one.check: one.level for one in findings}


def test_domains_that_differ_in_ranks_alone_are_no_problem_where_they_convert() -> None:
    two = info(layout=make_layout(2, pages=True), tensor_parallel=2)
    (found, _) = check_domains([info(layout=make_layout(pages=True)), two])
    assert (found.level, found.check) == (Level.OK, "cache domains")
    assert "convertible: tensor_parallel 1 here, 2 there" in found.says
    (found, _) = check_domains([info(), info(layout=make_layout(2), tensor_parallel=2)])
    assert found.level is Level.PROBLEM


def engine(**fields: Any) -> EngineView:
    cache = {"enable_prefix_caching": "True", "mamba_cache_mode": "align", "block_size": "16"}
    whole = {"url": "u", "version": "0.32", "cache": cache, "has_connector": True}
    return EngineView(**whole | fields)


def dense_cache() -> dict[str, str]:
    return {
        "enable_prefix_caching": "True",
        "mamba_cache_mode": "align",
        "mamba_block_size": "528",
        "block_size": "528",
        INTERVAL: "None",
    }


BOUNDARY = make_record().layout.boundary_tokens


@pytest.mark.parametrize(
    ("interval", "connector", "level", "words"),
    [
        ("0", True, Level.OK, "ends of its policy"),
        ("0", False, Level.WARNING, "computes the reply before it again"),
        ("None", True, Level.WARNING, "state at every boundary"),
        ("None", False, Level.WARNING, "state at every boundary"),
        (str(BOUNDARY), True, Level.WARNING, "state at every boundary"),
        (str(8 * BOUNDARY), True, Level.OK, f"every {8 * BOUNDARY} tokens"),
    ],
)
def test_retention_that_defeats_reuse_is_a_warning(
    interval: str, connector: bool, level: Level, words: str
) -> None:
    view = engine(cache=dense_cache() | {INTERVAL: interval}, has_connector=connector)
    (found,) = [one for one in check_engine(view, make_record()) if "retention" in one.check]
    assert found.level is level and words in found.says


def test_retention_says_how_much_less_fits() -> None:
    view = engine(cache=dense_cache())
    (found,) = [one for one in check_engine(view, make_record()) if "retention" in one.check]
    groups = make_record().layout.groups
    whole = sum(1 / g.block_tokens for g in groups if g.kind is GroupKind.FULL)
    share = whole / sum(1 / g.block_tokens for g in groups)
    assert 0 < share < 1 and f"{share:.0%}" in found.says


def test_retention_of_a_model_without_states_and_of_an_engine_that_is_silent() -> None:
    layout = make_layout()
    attention = msgspec.structs.replace(layout, groups=layout.groups[:1])
    assert attention.groups[0].kind is GroupKind.FULL
    record = msgspec.structs.replace(make_record(), layout=attention)
    found = check_engine(engine(cache=dense_cache()), record)
    assert [one.level for one in found if "retention" in one.check] == [Level.OK]
    silent = check_engine(engine(), make_record())
    assert not [one for one in silent if "retention" in one.check]


@pytest.mark.parametrize("policy", list(Policy))
def test_a_policy_that_publishes_no_end_of_a_turn_is_a_warning(policy: Policy) -> None:
    found = check_engine(engine(policy=policy.value), make_record())
    (one,) = [one for one in found if one.check.endswith(": policy")]
    assert (one.level is Level.WARNING) == (policy is Policy.MAIN_SPARSE)
    assert policy.value in one.says


@pytest.mark.parametrize(
    ("policy", "level"),
    [("fail", Level.WARNING), ("recompute", Level.OK), ("", Level.OK)],
)
def test_the_policy_for_failed_loads(policy: str, level: Level) -> None:
    found = check_engine(engine(failure_policy=policy), make_record())
    (one,) = [one for one in found if "kv_load_failure_policy" in one.check]
    assert one.level is level
    assert (policy or "not visible") in one.says
    assert ("recompute" in one.todo) == (policy == "fail")


def test_engines_side_by_side() -> None:
    a, b, c = (engine(url=name) for name in ("a", "b", "c"))
    same, other = info(), info(kv_dtype="fp8", tensor_parallel=2)
    found = check_side_by_side([(a, same), (b, same), (c, other)])
    assert [one.level for one in found] == [Level.OK, Level.PROBLEM, Level.PROBLEM]
    assert "kv_dtype" in found[1].says and "kv_dtype" in found[1].todo
    assert "a and c" in found[1].says and "b and c" in found[2].says
    assert check_side_by_side([(a, same)]) == []


@given(st.lists(st.sampled_from([None, info(), info(kv_dtype="fp8")]), max_size=5))
def test_no_engine_is_left_out_of_the_comparison_in_silence(
    infos: list[DomainInfo | None],
) -> None:
    seen = [(engine(url=f"engine-{number}."), one) for number, one in enumerate(infos)]
    found = check_side_by_side(seen)
    said = " ".join(one.says for one in found)
    compared = len(infos) - infos.count(None) > 1
    for view, one in seen:
        if one is None and len(infos) > 1:
            assert any(view.url in f.says and f.level is Level.WARNING for f in found)
        assert one is None or not compared or view.url in said


@pytest.mark.parametrize("elsewhere", ["", "backhaul://other:1"])
@pytest.mark.parametrize("record", [None, make_record()])
@pytest.mark.parametrize("domain", ["", "0123456789abcdef"])
def test_an_engine_is_in_order_only_where_its_cache_domain_was_read(
    domain: str, record: DomainRecord | None, elsewhere: str
) -> None:
    """A fresh engine that shows none may differ from every other."""
    found = check_engine(engine(domain=domain), record if domain else None, elsewhere)
    level = levels(found).get("engine u: connector")
    if not domain:
        assert level is Level.WARNING
    else:
        assert level is (Level.PROBLEM if elsewhere or record is None else None)


def test_every_warning_and_problem_says_what_to_do() -> None:
    findings = [
        check_store(StoreStats(counters={"full_objects": 1})),
        check_transports(ProbeResult((), "gone")),
        check_transports(ProbeResult(("tcp/lo",))),
        check_engine_transports("engine u", {"tcp/lo": 1}),
        *check_domains([]),
        *check_domains([info(clients=("p:worker",))]),
        *check_domains([info(), info(hash_function="xxhash"), info(hash_probe="01")]),
        *check_domains([info(hash_function="xxhash")]),
        *check_domains([info(hash_probe="01"), info()]),
        *check_engine(engine(error="gone"), None),
        *check_engine(engine(cache={}, has_connector=False, failure_policy="fail"), None),
        *check_engine(engine(cache={"mamba_block_size": "8"}, domain="x"), None),
        *check_engine(engine(cache={"mamba_cache_mode": "none"}), make_record()),
        *check_engine(engine(domain="x"), make_record(), "backhaul://other:1"),
        *check_side_by_side([(engine(url="a"), None), (engine(url="b"), info())]),
        *check_engine(engine(cache=dense_cache(), policy="main_sparse"), make_record()),
        *check_engine(engine(cache=dense_cache(), has_connector=False), None),
        *check_engine(
            engine(cache=dense_cache() | {INTERVAL: "0"}, has_connector=False), make_record()
        ),
        *check_side_by_side([(engine(url="a"), info()), (engine(url="b"), info(kv_dtype="fp8"))]),
    ]
    assert {one.level for one in findings} == set(Level)
    for one in findings:
        assert bool(one.todo) == (one.level is not Level.OK), one
        assert "\n" not in one.says + one.todo


def test_one_domain_of_two_engines_is_fine() -> None:
    assert set(levels(check_domains([info()])).values()) == {Level.OK}
    assert worst([]) is Level.OK


def test_other_models_are_no_mismatch() -> None:
    assert worst(check_domains([info(), info(model="other")])) is Level.OK


def test_a_live_domain_that_differs_is_a_problem_and_the_field_is_named() -> None:
    found = check_domains([info(), info(kv_dtype="fp8", idle_s=3.0)])
    assert worst(found) is Level.PROBLEM
    assert "kv_dtype" in found[0].says and "kv_dtype" in found[0].todo
    assert worst(check_domains([info(), info(kv_dtype="fp8", idle_s=9e4)])) is Level.WARNING


@pytest.mark.parametrize("fields", [{"hash_probe": "ff"}, {"hash_function": "xxhash"}])
def test_hashes_that_differ_are_named_as_such(fields: dict[str, str]) -> None:
    found = levels(check_domains([info(), info(**fields)]))
    assert found["prefix hash"] is Level.PROBLEM


@pytest.mark.parametrize("fields", [{"hash_probe": "ff"}, {"hash_function": "xxhash"}])
def test_what_an_engine_of_the_past_hashed_with_is_no_problem(fields: dict[str, str]) -> None:
    found = levels(check_domains([info(), info(idle_s=9e4, **fields)]))
    assert found == {"cache domains": Level.WARNING, "prefix hash": Level.OK}
    # The one in use is judged by itself, and two in use beside an older one are a problem.
    found = levels(check_domains([info(hash_function="xxhash"), info(idle_s=9e4)]))
    assert found["prefix hash"] is Level.WARNING
    three = [info(), info(hash_probe="01", idle_s=3.0), info(idle_s=9e4, **fields)]
    assert levels(check_domains(three))["prefix hash"] is Level.PROBLEM


@pytest.mark.parametrize("function", ["sha256", "xxhash"])
def test_hashes_that_differ_are_not_cured_by_what_is_there_already(function: str) -> None:
    family = [info(hash_function=function), info(hash_function=function, hash_probe="01")]
    (found,) = [one for one in check_domains(family) if one.check == "prefix hash"]
    assert "PYTHONHASHSEED" in found.todo
    assert ("sha256" in found.todo) == (function != "sha256")


@pytest.mark.parametrize(
    ("used", "level"),
    [
        (("cma/memory",), Level.OK),
        (("rc_mlx5/mlx5_0:1",), Level.OK),
        (("tcp/eth0",), Level.WARNING),
        (("tcp/eth0", "cuda_ipc/cuda"), Level.OK),
    ],
)
def test_bytes_over_tcp_alone_are_a_warning(used: tuple[str, ...], level: Level) -> None:
    """Of the probe, and of an engine."""
    assert check_transports(ProbeResult(used)).level is level
    gone = {"tcp/gone": 0, "cma/gone": 0}  # of an earlier connection
    found = check_engine_transports("engine u", {**dict.fromkeys(used, 2), **gone})
    assert found.level is level and found.check == "engine u: transports"
    assert all(f"{one} (2 ranks)" in found.says for one in used) and "gone" not in found.says


def test_an_engine_that_moved_nothing_yet_is_no_fault() -> None:
    for ranks in ({}, {"cma/memory": 0}):
        assert check_engine_transports("engine u", ranks).level is Level.OK


def test_ucx_report_of_a_read_is_understood() -> None:
    report = """
[1.1] [h:1:0] +-------+--------+-------------+----------------------------------+
[1.1] [h:1:0] | p intra-node cfg#1                                              |
[1.1] [h:1:0] | active message by ucp_am_send*(fast-completion) from host memory |
[1.1] [h:1:0] | Count | Range  | Description | Config                          |
[1.1] [h:1:0] |     3 | 0..inf | short       | tcp/lo                          |
[1.1] [h:1:0] | p inter-node cfg#2                                              |
[1.1] [h:1:0] | remote memory read by ucp_get*(multi) into host memory from host |
[1.1] [h:1:0] | Count | Range  | Description | Config                          |
[1.1] [h:1:0] |     2 | 0..inf | zero-copy   | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
[1.1] [h:1:0] |     0 | 0..9   | short       | ud_mlx5/mlx5_0:1                |
"""
    assert parse_used(report) == ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")
    assert parse_used("nothing") == ()


def test_an_engines_metrics_are_read_and_judged() -> None:
    facts = parse_metrics(METRICS)
    assert facts["prompts"] == {200.0: 6.0, 500.0: 7.0, math.inf: 20.0}
    assert facts["domain"] == "0123456789abcdef" and facts["has_connector"]
    assert facts["policy"] == "both" and facts["transports"] == {"cma/memory": 3}
    found = levels(check_engine(EngineView(url="u", **facts), make_record()))
    assert set(found.values()) == {Level.OK}


@given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=50),
    st.lists(st.integers(1, 5_000), min_size=1, max_size=8, unique=True),
    st.integers(1, 5_000),
)
def test_the_share_of_short_prompts_is_never_overstated(
    prompts: list[int], bounds: list[int], boundary: int
) -> None:
    histogram = {float(b): float(sum(p <= b for p in prompts)) for b in [*bounds, 10**9]}
    finding = check_prompts("x", histogram, boundary)
    known = max((n for bound, n in histogram.items() if bound <= boundary), default=0)
    said = f"at least {known:.0f} of " if known else "none of "
    assert finding.says.startswith(f"{said}{len(prompts)} prompts") and "0%" not in finding.says
    if finding.level is Level.WARNING:
        assert sum(p <= boundary for p in prompts) > len(prompts) / 2


def test_short_prompts_that_no_bucket_shows_are_told_as_counted() -> None:
    """Between the grid of 1,056 tokens and the bucket's bound below it lies every prompt."""
    histogram = {1000.0: 0.0, 2000.0: 9.0, math.inf: 10.0}
    text = 'backhaul:not_asked_total{reason="%s"} %d\n'
    counted = parse_metrics(
        "# TYPE backhaul:not_asked_total counter\n"
        + text % ("below_grid", 9)
        + text % ("handed_over", 50)
    )["short_prompts"]
    assert check_prompts("x", histogram, 1056).level is Level.OK
    finding = check_prompts("x", histogram, 1056, counted)
    assert finding.level is Level.WARNING and "at least 9 of 10 prompts" in finding.says
    assert "at least 10 of 10" in check_prompts("x", histogram, 1056, 12).says


@given(st.data())
def test_exactly_the_fields_that_differ_are_marked(data: st.DataObject) -> None:
    changes = {
        "kv_dtype": "fp8",
        "tensor_parallel": 2,
        "state_dtypes": ("float32",),
        "layout": make_layout(ranks=2),
        "vllm": "0.33",
    }
    chosen = data.draw(st.sets(st.sampled_from(sorted(changes))))
    a = make_record("m")
    b = msgspec.structs.replace(a, **{name: changes[name] for name in chosen})
    marked = {row.path for row in differences(a, b) if row.differs}
    assert {path.partition(".")[0] for path in marked} == chosen
    if "layout" in chosen:
        assert "layout.ranks" in marked and "layout.hash_tokens" not in marked
