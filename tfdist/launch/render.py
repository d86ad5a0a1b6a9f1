"""`tfdist launch --render`: the file of a job for a scheduler, instead of the job itself."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.cluster import kubernetes
from tfdist.cluster.address import shorten
from tfdist.cluster.variables import MONITOR, is_secret
from tfdist.command import as_typed, require_folder
from tfdist.config import did_you_mean
from tfdist.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_WRONG_USE, UsageError
from tfdist.launch.hosts import environment_options
from tfdist.launch.pods import check_amount, kept_folders, mount_points, remarks

SYSTEMS = ("slurm", "kubernetes")
_GRACE_S = 120
_PORT = 2222
_LONGEST_NAME = 40  # what Kubernetes appends fits into a host name, which has at most 63 characters
_KUBERNETES_OPTIONS = ("name", "namespace", "service_account", "cpu", "memory")
_HERE_ONLY = (
    *("mpi", "pin", "log_dir", "start_port", "hosts", "rsh", "python", "address", "start_timeout"),
    *("min_workers", "health_check", "restart_window", "hang_timeout"),
)
_OF_SCRIPTS = ("hang_timeout",)
_TAKEN_FROM_SLURM = ("ntasks", "gpus-per-task", "requeue", "no-requeue", "open-mode", "signal", "wrap")
_OFTEN_NEEDED = {"partition": "NAME", "account": "NAME", "time": "04:00:00"}  # by Slurm's sites
_OF_THE_SCHEDULER = ("TF_CONFIG", MONITOR, kubernetes.INDEX, kubernetes.WORKERS, kubernetes.HOST, kubernetes.PORT)
_SECRETS = {
    "slurm": "leave it out: sbatch passes what is set in your shell on to the job",
    "kubernetes": "leave it out, and name a Secret of the cluster under `env` in the file (valueFrom, secretKeyRef)",
}


@dataclass(frozen=True)
class Job:
    """A job to write down.

    Attributes:
        workers: How many workers.
        command: The script's path, then its arguments.
        image: The container image, for Kubernetes.
        gpus: GPUs of each worker; None leaves it to the scheduler.
        max_restarts: How often Kubernetes starts all workers again after one has failed.
        options: Options of the scheduler, as `name=value` or `name`.
        variables: Environment variables for the workers.
    """

    workers: int
    command: tuple[str, ...]
    image: str | None = None
    gpus: int | None = None
    max_restarts: int = 0
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the fields; raises UsageError."""
        for name, value, least in (
            ("workers", self.workers, 1),
            ("gpus", self.gpus, 1),
            ("max_restarts", self.max_restarts, 0),
        ):
            if value is not None and value < least:
                raise UsageError(f"{name}={value} has to be an integer of at least {least}")
        for text in (*self.command, *self.options, self.image or ""):
            if not _is_text(text):
                raise UsageError(f"{shorten(text)} has bytes that are no text, which a job file cannot hold")
        for name, value in self.variables.items():
            _check_variable(name, value)

    @property
    def name(self) -> str:
        """A name for the job, from that of the script: lower case letters, digits and dashes."""
        words = re.findall(r"[a-z0-9]+", Path(self.command[0]).stem.lower())
        name = "-".join(words)[:_LONGEST_NAME].strip("-")
        return name if name[:1].isalpha() else f"job-{name}".strip("-")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of rendering to those of `tfdist launch`.

    Args:
        parser: The parser.
    """
    group = parser.add_argument_group("to write the file of a job for a scheduler, instead of starting workers here")
    group.add_argument("--render", metavar="SYSTEM", choices=SYSTEMS, help=f"one of {', '.join(SYSTEMS)}")
    group.add_argument(
        "--render_to", metavar="FILE", help="a new file to write; without it the job goes to the standard output"
    )
    group.add_argument(
        "--render_option",
        metavar="NAME=VALUE",
        action="append",
        help="an option of the scheduler, such as partition=gpu or time=04:00:00 (slurm: any of sbatch; kubernetes: "
        f"{', '.join(_KUBERNETES_OPTIONS)}); may be given several times",
    )
    group.add_argument("--image", metavar="IMAGE", help="the container image (kubernetes)")
    group.add_argument("--gpus", metavar="G", type=int, help="how many GPUs each worker gets")


def wants(options: argparse.Namespace) -> bool:
    """Says whether a job file is wanted.

    Args:
        options: The parsed options of `tfdist launch`.

    Returns:
        True if --render is given.

    Raises:
        UsageError: If an option is given that is of no use without --render, or with it.
    """
    render_only = ("render_to", "render_option", "image", "gpus")
    for name in _HERE_ONLY if options.render else render_only:
        value = getattr(options, name, None)
        if value is None or value is False:
            continue
        given = as_typed(name, value)
        if options.render and name in _OF_SCRIPTS:
            why = (
                f"is for workers that this command starts; with --render={options.render} give it to the script, after "
                f"its name: scripts/train.py has a flag --{name}, and tfdist.make_strategy an argument {name}"
            )
        elif options.render:
            why = f"is for workers that this command starts; leave it out with --render={options.render}"
        else:
            why = f"is for job files; add --render={' or --render='.join(SYSTEMS)}, or leave it out"
        raise UsageError(f"{given} {why}")
    return bool(options.render)


def main(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Writes the job file that the options of `tfdist launch` ask for.

    Args:
        options: The parsed options.
        command: The script's path, then its arguments.

    Returns:
        The exit code.

    Raises:
        UsageError: If an option cannot be right, or the file exists already.
    """
    variables = carried(options.render, options.env or [], os.environ)
    job = Job(
        options.workers,
        tuple(command),
        image=options.image,
        gpus=options.gpus,
        max_restarts=options.max_restarts or 0,
        options=tuple(options.render_option or ()),
        variables=variables,
    )
    text = render(options.render, job)
    if options.render_to is None:
        sys.stdout.write(text)
    else:
        _write_new(options.render_to, text)
    for name in (name for name, value in variables.items() if is_secret(name, value)):
        print(
            f"tfdist launch: --env={name}=...: the value, which seems to be a secret, can be read in the job file; "
            f"better {_SECRETS[options.render]}",
            file=sys.stderr,
        )
    return EXIT_DONE


def carried(system: str, options: "list[str]", environ: Mapping[str, str]) -> dict[str, str]:
    """Reads what `--env` asks to write into a job file.

    Args:
        system: The scheduler.
        options: What was given, each `NAME` or `NAME=VALUE`.
        environ: Where the values of bare names are.

    Returns:
        The values, by name.

    Raises:
        UsageError: If a name cannot be one, a bare name is not set, or it is set to what seems to be a secret.
    """
    found: dict[str, str] = {}
    for option in options:
        variable = environment_options([option], environ)
        for name, value in variable.items():
            _check_variable(name, value)
            if "=" not in option and is_secret(name, value):
                raise UsageError(
                    f"--env={name}: its value seems to be a secret, and would be readable in the job file; "
                    f"{_SECRETS[system]}; or give --env={name}=VALUE to write it nevertheless"
                )
        found |= variable
    return found


def _check_variable(name: str, value: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(
            f"{as_typed('env', name)}: in a job file a variable's name has letters, digits and underscores, and no "
            "digit first"
        )
    if name in _OF_THE_SCHEDULER or name.startswith("SLURM_"):
        raise UsageError(f"--env={name}: the scheduler tells the workers who they are; leave it out")
    if not _is_text(value):
        raise UsageError(f"--env={name}: the value has bytes that are no text, which a job file cannot hold")


def _is_text(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def render(system: str, job: Job) -> str:
    """Writes a job down in the form of a scheduler.

    Args:
        system: "slurm" for a script for sbatch, "kubernetes" for the manifest of a JobSet.
        job: The job.

    Returns:
        The text of the file.

    Raises:
        UsageError: If the scheduler cannot have the job so.
    """
    if system == "slurm":
        return _slurm(job)
    if system == "kubernetes":
        return _kubernetes(job)
    raise UsageError(f"{as_typed('render', system)}: choose one of {', '.join(SYSTEMS)}{did_you_mean(system, SYSTEMS)}")


def _slurm(job: Job) -> str:
    if job.image is not None:
        raise UsageError(f"{as_typed('image', job.image)} is for --render=kubernetes; leave it out")
    if job.max_restarts:
        raise UsageError(
            f"--max_restarts={job.max_restarts}: Slurm starts a preempted job again as often as it takes, and a failed "
            "one never; leave it out with --render=slurm"
        )
    given = [_sbatch_option(option) for option in job.options]
    own = [f"--ntasks={job.workers}", "--requeue", "--open-mode=append", f"--signal=TERM@{_GRACE_S}"]
    if not any(option.startswith("--job-name=") for option in given):
        own.insert(0, f"--job-name={job.name}")
    if job.gpus is not None:
        own.append(f"--gpus-per-task={job.gpus}")
    names = {option[2:].partition("=")[0] for option in given}
    return _fill(
        "slurm.sh.jinja",
        options=own + given,
        offered=[f"--{name}={value}" for name, value in _OFTEN_NEEDED.items() if name not in names],
        variables={name: shlex.quote(value) for name, value in job.variables.items()},
        command=shlex.join(["python", *job.command]),
        preempted=EXIT_REQUEUE,
        grace_s=_GRACE_S,
    )


def _sbatch_option(option: str) -> str:
    name, separator, value = option.partition("=")
    typed = as_typed("render_option", option)
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise UsageError(
            f"{typed}: a long option of sbatch is needed, without the dashes before it, such "
            "as partition=gpu or exclusive"
        )
    if name in _TAKEN_FROM_SLURM:
        raise UsageError(f"{typed}: tfdist writes this option itself; leave it out, or edit the job file")
    if separator and not value:
        raise UsageError(f"{typed}: there is no value after the =; give one, or leave the = out if sbatch needs none")
    if not re.fullmatch(r"[ !-~]*", value) or set(value) & set("\"'\\#"):
        raise UsageError(
            f"{typed}: the value may have no quotes, backslashes, # or line breaks; write the line into the job file"
        )
    return f"--{name}{separator}" + (f'"{value}"' if re.search(r"[^\w.,:/=@%+-]", value) else value)


def _kubernetes(job: Job) -> str:
    if not job.image:
        raise UsageError("--image is missing: --render=kubernetes needs the container image of the workers")
    options = _kubernetes_options(job)
    folders = kept_folders(job.command)
    name = options.get("name", job.name)
    resources = {
        "cpu": options.get("cpu"),
        "memory": options.get("memory"),
        "nvidia.com/gpu": None if job.gpus is None else str(job.gpus),
    }
    return _fill(
        "kubernetes.yaml.jinja",
        name=name,
        namespace=options.get("namespace"),
        service_account=options.get("service_account"),
        workers=job.workers,
        max_restarts=job.max_restarts,
        image=job.image,
        # Kubernetes puts variables in the place of $(NAME); $$ stands for one $.
        command=[word.replace("$", "$$") for word in ("python", *job.command)],
        variables={
            "PYTHONUNBUFFERED": "1",
            **{variable: value.replace("$", "$$") for variable, value in job.variables.items()},
            kubernetes.WORKERS: str(job.workers),
            kubernetes.HOST: f"{name}-workers-0-{{}}.{name}",
            kubernetes.PORT: str(_PORT),
        },
        port=_PORT,
        remarks=remarks(folders),
        mounts=mount_points(folders),
        resources={resource: amount for resource, amount in resources.items() if amount},
        preempted=EXIT_REQUEUE,
        wrong_use=EXIT_WRONG_USE,
        grace_s=_GRACE_S,
    )


def _kubernetes_options(job: Job) -> dict[str, str]:
    options: dict[str, str] = {}
    for option in job.options:
        name, _, value = option.partition("=")
        if name not in _KUBERNETES_OPTIONS or not value:
            raise UsageError(
                f"{as_typed('render_option', option)}: for kubernetes NAME=VALUE with one of the names "
                f"{', '.join(_KUBERNETES_OPTIONS)} is needed; edit the job file for all else"
            )
        if name in ("cpu", "memory"):
            check_amount(name, value)
        options[name] = value
    name = options.get("name", job.name)
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > _LONGEST_NAME:
        raise UsageError(
            f"{as_typed('render_option', f'name={name}')}: a name of at most {_LONGEST_NAME} lower case letters, "
            "digits and dashes is needed, with a letter first"
        )
    return options


def _fill(template: str, **values: object) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # it is slow to import, and seldom needed

    environment = Environment(
        loader=PackageLoader("tfdist.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quoted"] = _quoted
    return environment.get_template(template).render(values)


def _quoted(text: str) -> str:
    """Returns a text as YAML's double quotes hold it."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if " " <= character <= "~" else f"\\U{ord(character):08x}"


def _write_new(path: str, text: str) -> None:
    """Writes a file that does not exist yet, whole or not at all."""
    require_folder("--render_to", path)
    aside = Path(f"{path}.{os.getpid()}.new")
    try:
        with aside.open("x", encoding="utf8") as file:
            file.write(text)
        try:
            os.link(aside, path)  # unlike a renaming, it replaces nothing
        finally:
            aside.unlink()
    except FileExistsError:
        raise UsageError(f"--render_to={path}: it exists already; name a new file, or remove it first") from None
    except OSError as error:
        raise UsageError(f"--render_to={path}: it cannot be written ({error.strerror or error})") from None
