"""Runs the real matrix: engines up, arm after arm with progress, results and report on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from backhaul.benchmarks.reuse.lines import appending
from backhaul.benchmarks.reuse.matrix import Matrix, RunArm, left_to_do, planned
from backhaul.benchmarks.reuse.model_shape import preset
from backhaul.benchmarks.reuse.real import RealArms
from backhaul.benchmarks.reuse.record import RESULTS, Arm, read_results, write_results
from backhaul.benchmarks.reuse.report import build_report, write_report
from backhaul.benchmarks.reuse.workloads import Sizes, workload
from backhaul.deploy.arguments import writing
from backhaul.deploy.console import Console
from backhaul.deploy.pair import Pair
from backhaul.deploy.progress import say_stopping
from backhaul.deploy.tiny_model import build_tiny_model
from backhaul.protocols.errors import ConfigError

MODEL = "tiny-hybrid"
"""What the engines run, and the preset that tells its shape."""
OPTIONS = {"stream_ahead": False}
"""Of both engines. A publication is asked about once, with the first bytes that it brings: only one
that comes whole is weighed whole, as the simulator's are."""
SETTINGS = "settings.json"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all arms of one directory share; lines of others cannot be compared with them."""

    sizes: Sizes
    concurrency: int
    seed: int = 0


def run_matrix(
    console: Console,
    matrix: Matrix,
    sizes: Sizes,
    *,
    directory: Path,
    cache_dir: Path,
    concurrency: int,
) -> None:
    """Run what ``directory`` does not have yet, then write the report from all of it.

    Raises ``ConfigError`` where the directory cannot be used, ``ServiceError`` where an engine or
    the store fails; what was finished by then is kept.
    """
    settings = Settings(sizes=sizes, concurrency=concurrency, seed=matrix.seed)
    path = directory / RESULTS
    with results_file(directory) as file:
        keep_to_settings(directory, settings)
        every = planned(matrix)
        arms = left_to_do(every, read_results(path))
        console.print(f"{len(arms)} arms to run, {len(every) - len(arms)} done; {path}")
        if arms:
            model = build_tiny_model(cache_dir / MODEL)
            console.print(f"starting a pair (about a minute), logs in {directory / 'logs'}")
            pair = Pair(
                model,
                directory / "logs",
                options=OPTIONS,
                engine_env={"VLLM_SERVER_DEV_MODE": "1"},
                on_interrupt=say_stopping,
            )
            with pair, pair.naming_failures():
                real = RealArms(pair, preset(MODEL), concurrency=concurrency)
                run_arms(console, arms, sizes, file, real.run, seed=matrix.seed)
    with writing("DIRECTORY", directory):
        reports = write_report(build_report(read_results(path)), directory)
    for report in reports:
        console.print(f"wrote {report}")


def run_arms(
    console: Console,
    arms: Sequence[Arm],
    sizes: Sizes,
    file: IO[bytes],
    run: RunArm,
    *,
    seed: int = 0,
) -> None:
    """Run the arms and append each one's lines once it is finished. Arms of one repeat replay the
    same turns, drawn from ``seed`` plus its number."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(arms))
        for number, arm in enumerate(arms, 1):
            title = f"{arm.workload} {arm.policy} {arm.limit} P_end {arm.prompt_end}"
            progress.update(task, description=title)
            if not console.is_terminal:
                console.print(f"{number}/{len(arms)} {title}, repeat {arm.repeat}")
            turns = workload(arm.workload, sizes, seed=seed + arm.repeat)
            write_results(run(arm, turns), file)
            progress.advance(task)


@contextlib.contextmanager
def results_file(directory: Path) -> Iterator[IO[bytes]]:
    """The file of results in a directory, which is made, to append to; see ``lines.appending``.
    Raises ``ConfigError``."""
    path = directory / RESULTS
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(appending(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
        yield file


def keep_to_settings(directory: Path, settings: Settings) -> None:
    """Note the settings in a new directory. Raises ``ConfigError`` where they were others."""
    path = directory / SETTINGS
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=Settings)
    except FileNotFoundError:
        # Whole or not there: who is killed here can go on, too.
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(settings)) + b"\n")
        new.replace(path)
        return
    except (msgspec.MsgspecError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; take another directory") from None
    ours, theirs = _flat(settings), _flat(earlier)
    for name, value in ours.items():
        if value != theirs[name]:
            raise ConfigError(
                f"{directory} has results with {name} {theirs[name]}, this run has {value}: take "
                "another directory"
            )


def _flat(settings: Settings) -> dict[str, object]:
    others = {name: getattr(settings, name) for name in ("concurrency", "seed")}
    return {**msgspec.structs.asdict(settings.sizes), **others}
