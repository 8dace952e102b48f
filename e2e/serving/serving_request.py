"""Options of ``python -m e2e serve`` and of :func:`e2e.serve`, checked before any work. Loads no library of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from costmodel.base.errors import InputError
from costmodel.base.units import check_count, read_seconds, whole_number
from e2e.step.option_fields import Options, option
from e2e.step.options import parse_routing

_MODEL, _GPUS, _ENGINE, _LOAD = "The model", "The GPUs", "The engine", "The load"
# Most requests of a run, which bounds its time and memory.
MOST_REQUESTS = 1_000_000
# Figures over the requests that a plan holds targets with.
Percentile = Literal["mean", "p50", "p90", "p99"]
# Routers of e2e.serving.replicas.
Router = Literal["round-robin", "least-loaded", "prefix"]


def _seconds_option(name: str, help: str) -> Any:
    return option(help, None, read=lambda value: read_seconds(name, value), as_text=True, panel=_LOAD)


def _requests(value: int | str | Path) -> int | Path:
    """A number of requests, or the file of a trace."""
    number = whole_number(value) if isinstance(value, str) else value
    if number is None or isinstance(number, Path):
        if str(value)[:1] in "+-.0123456789" and not Path(value).is_file():  # type: ignore[arg-type]
            raise InputError(f"--requests {value}: must be a whole number, 1 or more, or the file of a trace")
        return Path(value)  # type: ignore[arg-type]
    check_count("requests", number)
    if number > MOST_REQUESTS:
        raise InputError(f"--requests {number}: must be at most {MOST_REQUESTS:,}")
    return number


@dataclass(frozen=True, kw_only=True)
class ServedLoad(Options):
    """A language model, the requests that it serves, and latency targets."""

    panel: ClassVar[str] = _LOAD

    model: str | None = option(
        "Language model: llama-3.1-8b, qwen3-235b, deepseek-r1 ... or its name on the Hugging Face hub.",
        None, panel=_MODEL,
    )  # fmt: skip
    model_config: Path | None = option("config.json of a model on the Hugging Face hub.", None, panel=_MODEL)
    precision: str = option(
        "Number types, such as weights=fp8,experts=mxfp4,activations=fp8,kv=fp8; default: as the model is stored.",
        "", panel=_MODEL,
    )  # fmt: skip
    input_length: int = option("Tokens of the longest prompt.", 1024, least=1)
    output_length: int = option("Tokens of the longest output.", 256, least=1)
    shortest_length: float = option(
        "Lengths are drawn evenly between this share of the longest and the longest.", 1.0, within=(1e-6, 1)
    )
    concurrency: int | None = option(
        "Users that each send a request after the answer to the one before; default: 1.", None, least=1
    )
    rate: float | None = option(
        "Requests per second that arrive at random, in place of --concurrency.", None, within=(1e-6, 1e6)
    )
    ttft: float | None = _seconds_option("ttft", "Target for the time to the first token, such as 500ms.")
    tpot: float | None = _seconds_option("tpot", "Target for the time per output token, such as 40ms.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.model_config is None):
            raise InputError("give --model NAME or --model-config FILE, one of them")
        if self.rate is not None and self.concurrency is not None:
            raise InputError("--rate and --concurrency: users either wait for answers or arrive at a rate; give one")

    def to_json(self) -> dict[str, Any]:
        """Options that differ from their defaults, as JSON has them."""
        return {name: str(each) if isinstance(each, Path) else each for name, each in self.given_values().items()}


@dataclass(frozen=True, kw_only=True)
class ServingRequest(ServedLoad):
    """A language model on GPUs, and the requests that it serves; by the names of the command line."""

    panel: ClassVar[str] = _GPUS

    routing: str = option(
        "Tokens of each expert: drawn=1 (default: by popularity; 0: all alike), power-law=1.01, balanced.",
        "drawn=1", panel=_MODEL,
    )  # fmt: skip
    gpu: str = option("GPU or cluster: a name (`python -m costmodel machines`) or a YAML file.", "")
    gpus: int = option("Number of GPUs of one copy of the model.", 1, least=1)
    parallel: str = option("How the GPUs share the model: tp=8,ep=8,dp-attention=8,pp=1; default: tp over all.", "")
    engine: str = option("Serving engine: vllm, sglang or trtllm, with =VERSION for a version.", "vllm", panel=_ENGINE)
    engine_options: str = option(
        "Values of the engine: token-budget=2048,sequences=256,memory-share=0.95,server=50ms ... (docs/serving.md).",
        "", panel=_ENGINE,
    )  # fmt: skip
    speculate: str = option(
        "Speculative decoding: tokens=3,acceptance=0.7, and draft=MODEL unless the model predicts them itself.",
        "", panel=_ENGINE,
    )  # fmt: skip
    replicas: int = option("Copies of all that --gpus says, behind a router.", 1, least=1)
    router: Router = option("Which copy serves a request.", "round-robin")
    disaggregate: str = option(
        "Copies for prompts and for decoding: prefill=2,decode=6, and prefill-tp=4,decode-tp=8,... if they differ.", ""
    )
    requests: int | Path | None = option(
        "Number of requests (default: 10 per user, 1000 at a rate), or a trace: .csv or .jsonl of Azure, BurstGPT or "
        "Mooncake.", None, read=_requests, as_text=True, panel=_LOAD,
    )  # fmt: skip
    prefix_length: int | None = option("Tokens that prompts begin with in common.", None, least=1, panel=_LOAD)
    prefix_share: float = option("Share of the prompts with such a beginning.", 1.0, within=(0, 1), panel=_LOAD)
    prefix_groups: int = option("Number of different beginnings.", 1, least=1, panel=_LOAD)
    duration: float | None = _seconds_option("duration", "Time in which requests are sent, such as 60s.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gpu:
            raise InputError("give --gpu NAME; `python -m costmodel machines` lists all")
        if self.disaggregate and self.replicas > 1:
            raise InputError("--replicas and --disaggregate: both say the number of copies; leave one out")
        if self.disaggregate and self.router != "round-robin":
            raise InputError(
                "--router and --disaggregate: the copy with the fewest requests gets the next; leave one out"
            )
        said = ("rate", "input_length", "output_length", "shortest_length", "prefix_length")
        for name in said if self.trace is not None else ():
            if name in self.given_values():
                raise InputError(f"--{name.replace('_', '-')}: {self.trace} says how requests are; leave it out")
        begins = self.router == "prefix" or self.prefix_share < 1 or self.prefix_groups > 1
        if begins and not self.prefix_length and not self.trace:
            raise InputError("--router prefix, --prefix-share and --prefix-groups: give --prefix-length too")
        if self.duration is not None and self.trace is None:
            if self.requests is not None:
                raise InputError("--requests and --duration: each says when the run ends; give one")
            if self.rate is None:
                raise InputError("--duration: is for --rate and traces; with users give the number of --requests")
            if self.count > MOST_REQUESTS:
                raise InputError(f"--duration: {self.count:,} requests arrive; at most {MOST_REQUESTS:,} are taken")
        parse_routing(self.routing)

    @property
    def trace(self) -> Path | None:
        """The file of requests, if one was given."""
        return self.requests if isinstance(self.requests, Path) else None

    @property
    def count(self) -> int:
        """Number of requests that are not those of a trace."""
        if isinstance(self.requests, int):
            return self.requests
        if self.rate is None:
            return min(10 * (self.concurrency or 1), MOST_REQUESTS)
        return 1000 if self.duration is None else max(round(self.rate * self.duration), 1)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ServedLoad):
    """A model, its load and latency targets, and what there is to choose among; options of ``e2e plan serve``."""

    panel: ClassVar[str] = _GPUS

    gpus_of: str = option("GPUs to choose among, such as h100-sxm,b200-sxm,l40s.", "")
    gpus: str = option("Numbers of GPUs that one copy may have.", "1,2,4,8")
    disaggregate: str = option("Try copies apart for prompts and decoding too, such as prefill=1,decode=3.", "")
    engine: str = option("Engines to choose among, such as vllm,sglang,trtllm=1.1.", "vllm", panel=_ENGINE)
    speculate: str = option("Try this speculative decoding too, as `e2e serve` takes it.", "", panel=_ENGINE)
    price: str | None = option(
        "Dollars per GPU and hour, or a YAML file with those of each GPU; default: the fewest GPUs are the cheapest.",
        None,
    )
    percentile: Percentile = option(
        "What must hold the targets: the mean over all requests, or so many per cent of them.", "mean", panel=_LOAD
    )
    probability: float = option(
        "How sure it must be that the targets are held: from the intervals.", 0.9, within=(0.5, 0.999), panel=_LOAD
    )
    workers: int | None = option("Processes; default: the cores of this process.", None, least=1, panel=Options.panel)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gpus_of:
            raise InputError("give --gpus-of NAMES, such as h100-sxm,l40s; `python -m costmodel machines` lists all")
        if self.concurrency is None and self.rate is None:
            raise InputError("give --concurrency USERS or --rate REQUESTS_PER_SECOND")

    def served(self, **changes: Any) -> ServingRequest:
        """A request of ``serve`` with the same model and lengths."""
        same = ("model", "model_config", "input_length", "output_length", "shortest_length")
        return ServingRequest(**{name: getattr(self, name) for name in same} | changes)
