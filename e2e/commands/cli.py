"""``python -m e2e predict | serve | plan serve | sweep | shard | doctor``.

Exit status: 0 success, 1 ``doctor`` found something broken, 2 invalid user input (one line on standard error), 3 a
predicted step may not fit the memory of its GPUs, 4 it or a served model does not fit, 130 stopped with Ctrl-C, 143
terminated by SIGTERM. With ``--json`` standard output contains only JSON.
"""

from __future__ import annotations

import gc
import sys

import typer

from costmodel.base.command_line import ProgramGroup, guarded, program_name, repeat_options, version_command
from e2e.commands.predict_command import JsonOption, predict_command
from e2e.commands.serve_command import plan_serve_command, serve_command
from e2e.commands.shard_command import shard_command
from e2e.commands.sweep_command import sweep_command

app = typer.Typer(
    name="e2e",
    cls=ProgramGroup,
    help="Step time of training and inference on GPUs, without the GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(version_command)


def main() -> None:
    """Run the command line of ``python -m e2e``."""
    # Most objects of a prediction live to its end: garbage collection at the default thresholds takes a fifth of the
    # time.
    gc.set_threshold(100_000, 20, 20)
    app(with_command(repeat_options(sys.argv[1:], ("--trace", "--kineto"))), prog_name=program_name("e2e"))


def with_command(words: list[str]) -> list[str]:
    """Return the arguments with the words after ``--``, which are the user's program, as options ``--command``."""
    if "--" not in words:
        return words
    place = words.index("--")
    if words[:1] != ["predict"]:
        said = "takes no program; for each GPU type: e2e predict --gpu GPU -- COMMAND"
        print(f"error: {words[0]}: {said}", file=sys.stderr)
        raise SystemExit(2)
    return [*words[:place], *(f"--command={word}" for word in words[place + 1 :])]


app.command("predict")(guarded()(predict_command))
app.command("serve")(guarded()(serve_command))
plan = typer.Typer(help="The cheapest hardware for a task.", no_args_is_help=True)
plan.callback()(lambda: None)
plan.command("serve")(guarded("stopped; what is above was done")(plan_serve_command))
app.add_typer(plan, name="plan")
app.command("sweep")(guarded("stopped; results so far are kept")(sweep_command))
app.command("shard")(guarded()(shard_command))


@app.command("doctor")
@guarded()
def doctor(as_json: JsonOption = False) -> None:
    """Check the installation; status 1, and what to do, if something is broken."""
    from e2e.commands.doctor import doctor_command

    doctor_command(as_json)
