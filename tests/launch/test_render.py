"""`tfdist launch --render`: job files that parse, say what was asked for, and hold any argument."""

import os
import re
import shlex
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tfdist import cli
from tfdist.cluster import Cluster
from tfdist.errors import UsageError
from tfdist.launch.pods import check_amount
from tfdist.launch.render import Job, carried, render

ARGUMENTS = (
    "a b",
    "it's",
    '"q"',
    "$HOME $(date) $$",
    "`x`",
    "two\nlines",
    "back\\slash",
    "#no",
    "ümläut \U0001f600",
    "",
)
_WORDS = st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12), max_size=4)


def job(*options: str, **changes: object) -> Job:
    return Job(**{"workers": 2, "command": ("scripts/my train_1.py", *ARGUMENTS), "options": options, **changes})


def pod_spec(manifest: str) -> dict:
    return yaml.safe_load(manifest)["spec"]["replicatedJobs"][0]["template"]["spec"]


def expand(word: str) -> str:
    """Does what Kubernetes does with a word of a command that names no variables."""
    assert "$(" not in word.replace("$$", "")
    return word.replace("$$", "$")


def srun_line(script: str) -> str:
    return script.partition("\ntrap : TERM\n")[2].partition("\ncode=$?")[0]


def words_that_srun_gets(script: str) -> list[str]:
    """Asks bash."""
    line = srun_line(script)
    command = 'srun() { printf "%s\\0" "$@"; }\n' + line
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=20, check=True)
    return done.stdout.decode().split("\0")[:-1]


def test_slurm_script():
    script = render("slurm", job("partition=gpu", "exclusive", "comment=two words", gpus=4))
    assert subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True, check=False).stderr == b""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert lines == [
        "--job-name=my-train-1",
        "--ntasks=2",
        "--requeue",
        "--open-mode=append",
        "--signal=TERM@120",
        "--gpus-per-task=4",
        "--partition=gpu",
        "--exclusive",
        '--comment="two words"',
    ]
    assert words_that_srun_gets(script) == ["python", "scripts/my train_1.py", *ARGUMENTS]


@given(_WORDS)
def test_the_shell_gets_what_was_given(words):
    script = render("slurm", job(command=("x.py", *words)))
    assert shlex.split(srun_line(script)) == ["srun", "python", "x.py", *words]


@given(_WORDS)
def test_yaml_gives_what_was_given(words):
    spec = pod_spec(render("kubernetes", job(command=("x.py", *words), image="i")))
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert [expand(word) for word in command] == ["python", "x.py", *words]


def test_kubernetes_manifest():
    options = ("namespace=team", "service_account=trainer", "cpu=8", "memory=32Gi")
    text = render("kubernetes", job(*options, image="registry/image:1", gpus=2, max_restarts=3, workers=4))
    manifest = yaml.safe_load(text)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {"name": "my-train-1", "namespace": "team"}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3
    (jobs,) = manifest["spec"]["replicatedJobs"]
    spec = jobs["template"]["spec"]
    assert (jobs["name"], jobs["replicas"]) == ("workers", 1)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    actions = {rule["action"]: rule for rule in reversed(spec["podFailurePolicy"]["rules"])}
    assert actions["FailJob"]["onExitCodes"]["values"] == [2]
    assert actions["Ignore"]["onExitCodes"]["values"] == [75]
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 120)
    assert pod["serviceAccountName"] == "trainer"
    (container,) = pod["containers"]
    assert container["image"] == "registry/image:1"
    assert [expand(word) for word in container["command"]] == ["python", "scripts/my train_1.py", *ARGUMENTS]
    assert container["resources"] == {"limits": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "2"}}
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    found = Cluster.detect({**environ, "JOB_COMPLETION_INDEX": "3"})
    # <job set>-<replicated job>-<its index>-<completion index>.<subdomain, which is the job set's name>
    assert found == Cluster(tuple(f"my-train-1-workers-0-{i}.my-train-1:2222" for i in range(4)), 3, "Kubernetes")
    assert container["ports"] == [{"containerPort": 2222}]


def test_what_was_not_asked_for_is_left_out():
    manifest = yaml.safe_load(render("kubernetes", job(image="i")))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert "resources" not in pod["containers"][0] and "serviceAccountName" not in pod
    assert "namespace" not in manifest["metadata"] and manifest["spec"]["failurePolicy"]["maxRestarts"] == 0
    script = render("slurm", job("job-name=mine"))
    assert "gpus" not in script and script.count("job-name") == 1


@pytest.mark.parametrize(
    ("script", "name"),
    [("a/Train_GPT.py", "train-gpt"), ("3d.py", "job-3d"), ("ü.py", "job"), ("x" * 90 + ".py", "x" * 40)],
)
def test_names(script, name):
    assert Job(1, (script,)).name == name


@pytest.mark.parametrize(
    ("system", "changes", "said"),
    [
        ("nomad", {}, "--render=nomad: choose one of slurm, kubernetes"),
        ("kubernetes", {}, "--image is missing"),
        ("kubernetes", {"image": "i", "options": ("partition=gpu",)}, "name, namespace, service_account, cpu, memory"),
        (
            "kubernetes",
            {"image": "i", "options": ("name=My Job",)},
            "--render_option='name=My Job': a name of at most 40 lower",
        ),
        ("slurm", {"image": "i"}, "--image=i is for --render=kubernetes"),
        ("slurm", {"max_restarts": 2}, "--max_restarts=2: Slurm"),
        ("slurm", {"options": ("-p gpu",)}, "--render_option='-p gpu': a long option of sbatch"),
        ("slurm", {"options": ("ntasks=3",)}, "--render_option=ntasks=3: tfdist writes this option itself"),
        ("slurm", {"options": ("comment=a\n#SBATCH --wrap=x",)}, "no quotes, backslashes, # or line breaks"),
        ("slurm", {"options": ('comment="',)}, "no quotes"),
        ("slurm", {"options": ("exclusive=",)}, "--render_option=exclusive=: there is no value after the ="),
        ("slurm", {"variables": {"1A": ""}}, "--env=1A: in a job file a variable's name has letters"),
        ("slurm", {"variables": {"A-B": ""}}, "--env=A-B: in a job file a variable's name has letters"),
        ("kubernetes", {"image": "i", "variables": {"TFDIST_PORT": "1"}}, "--env=TFDIST_PORT: the scheduler tells"),
        ("slurm", {"variables": {"TF_CONFIG": "{}"}}, "--env=TF_CONFIG: the scheduler tells"),
        ("slurm", {"variables": {"A": "\udcff"}}, "--env=A: the value has bytes that are no text"),
        ("slurm", {"workers": 0}, "workers=0 has to be an integer of at least 1"),
        ("slurm", {"gpus": 0}, "gpus=0 has to be"),
        ("slurm", {"command": ("x.py", "\udcff")}, "bytes that are no text"),
    ],
)
def test_refuses(system, changes, said):
    with pytest.raises(UsageError) as raised:
        render(system, job(**changes))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--render=slurm", "--mpi"],
            "error: --mpi is for workers that this command starts; leave it out with --render=slurm",
        ),
        (["--render=slurm", "--hosts=h1"], "--hosts=h1 is for workers that this command starts"),
        (["--render=slurm", "--pin=1"], "--pin=1 is for workers that this command starts"),
        (["--render=slurm", "--pin=0"], "--pin=0 is for workers that this command starts"),
        (["--render=slurm", "--min_workers=1"], "--min_workers=1 is for workers that this command starts"),
        (["--render=kubernetes", "--health_check=true"], "--health_check=true is for workers that this command"),
        (["--render=slurm", "--restart_window=3600"], "--restart_window=3600 is for workers that this command"),
        (
            ["--render=kubernetes", "--hang_timeout=30"],
            "--hang_timeout=30 is for workers that this command starts; with --render=kubernetes give it to the "
            "script, after its name",
        ),
        (["--render=slurm", "--max_restarts=1"], "--max_restarts=1: Slurm"),
        (["--gpus=0"], "--gpus=0 is for job files"),
        (
            ["--render_option=a=1", "--render_option", "b"],
            "error: --render_option=a=1 --render_option=b is for job files",
        ),
        (["--render=slurm", "--health_check=test -d x"], "error: --health_check='test -d x' is for workers that"),
        (["--start_timeout=30"], "error: --start_timeout=30 is for workers on other hosts"),
        (["--render=slurm", "--env=TFDIST_NOT_SET"], "TFDIST_NOT_SET is not set here"),
        (["--render=kubernetes", "--image=i", "--render_option=memory=32GB"], "--render_option=memory=32GB: a number"),
        (["--image=i"], "--image=i is for job files; add --render=slurm or --render=kubernetes"),
        (["--render=nomad"], "--render"),
        (["--render=slurm", "--render_to=no-such-folder/job"], "there is no folder"),
    ],
)
def test_wrong_use_of_the_command(args, said, capsys):
    assert cli.main(["launch", "--workers=2", *args, __file__]) == 2
    assert said in capsys.readouterr().err


def test_the_command_writes_to_its_output_or_to_a_new_file(tmp_path, capsys):
    args = ["launch", "--workers=2", "--render=slurm", "--render_option", "time=10", "x.py", "--steps=1"]
    assert cli.main(args) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --time=10\n" in text and "srun python x.py --steps=1\n" in text
    place = tmp_path / "job.sh"
    args.insert(1, f"--render_to={place}")
    assert cli.main(args) == 0 and place.read_text() == text
    place.write_text("mine")
    assert cli.main(args) == 2
    assert place.read_text() == "mine" and "exists already" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["job.sh"]


def _offered(script: str) -> list[str]:
    return [line.removeprefix("##SBATCH ") for line in script.splitlines() if line.startswith("##SBATCH")]


def test_slurm_options_that_were_given_are_not_offered():
    assert _offered(render("slurm", job())) == ["--partition=NAME", "--account=NAME", "--time=04:00:00"]
    assert _offered(render("slurm", job("partition=gpu", "time=10", "time-min=5"))) == ["--account=NAME"]
    script = render("slurm", job("partition=gpu", "time=10", "account=me"))
    assert _offered(script) == [] and "One # less" not in script


def worker_and_volumes(manifest: str) -> tuple[dict, list]:
    pod = pod_spec(manifest)["template"]["spec"]
    return pod["containers"][0], pod["volumes"]


def edited(manifest: str) -> str:
    """Does what the comments ask for: takes the # away from the volume and its mounts."""
    return re.sub(r"^( +)# ((- name: shared|  ).*)$", r"\1\2", manifest, flags=re.MULTILINE)


_SHM = {"name": "shared-memory", "mountPath": "/dev/shm"}


def test_shared_memory_is_that_of_the_machine():
    worker, volumes = worker_and_volumes(render("kubernetes", job(image="i")))
    assert worker["volumeMounts"] == [_SHM]
    assert volumes == [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]


@pytest.mark.parametrize(
    ("arguments", "mounts", "said"),
    [
        ([], [{"mountPath": "/PATH"}], []),
        (["--checkpoint_dir="], [{"mountPath": "/PATH"}], []),
        (["--checkpoint_dir=gs://bucket/run"], [{"mountPath": "/PATH"}], []),
        (
            ["--checkpoint_dir=/a b/c/"],
            [{"mountPath": "/a b/c"}],
            ['"--checkpoint_dir=/a b/c/" has to be on such a disk, or restarts begin at step 0.'],
        ),
        (
            ["-checkpoint_dir", "runs/c"],
            [{"mountPath": "/PATH"}],
            [
                '"--checkpoint_dir=runs/c" (in the image\'s working directory) has to be on such a disk, or restarts '
                "begin at step 0."
            ],
        ),
        (
            ["--log_dir=/l", "--checkpoint_dir=/c"],
            [{"mountPath": "/l", "subPath": "log_dir"}, {"mountPath": "/c", "subPath": "checkpoint_dir"}],
            [
                '"--log_dir=/l" has to be on such a disk, or it is gone with its pod.',
                '"--checkpoint_dir=/c" has to be on such a disk, or restarts begin at step 0.',
            ],
        ),
        (
            ["--log_dir=/r/log\n- x", "--checkpoint_dir=/r"],
            [{"mountPath": "/r"}],
            [
                r'"--log_dir=/r/log\U0000000a- x" has to be on such a disk, or it is gone with its pod.',
                '"--checkpoint_dir=/r" has to be on such a disk, or restarts begin at step 0.',
            ],
        ),
    ],
)
def test_folders_that_have_to_outlive_a_pod(arguments, mounts, said):
    manifest = render("kubernetes", job(command=("x.py", *arguments), image="i"))
    comments = [line.strip().removeprefix("# ") for line in manifest.splitlines() if "has to be on" in line]
    assert comments == said
    assert worker_and_volumes(manifest)[0]["volumeMounts"] == [_SHM]
    worker, volumes = worker_and_volumes(edited(manifest))
    assert worker["volumeMounts"] == [_SHM, *({"name": "shared", **mount} for mount in mounts)]
    assert volumes[1:] == [{"name": "shared", "persistentVolumeClaim": {"claimName": "NAME"}}]


@pytest.mark.parametrize("amount", ["32Gi", "500M", "1.5Ti", ".5Gi", "2048Ki", "34359738368", "1e10", "12E9", "3E"])
def test_amounts_of_memory(amount):
    check_amount("memory", amount)
    worker, _ = worker_and_volumes(render("kubernetes", job(f"memory={amount}", image="i")))
    assert worker["resources"]["limits"]["memory"] == amount


@pytest.mark.parametrize(
    ("option", "said"),
    [
        *(
            (f"memory={amount}", "a number with a unit")
            for amount in ("32GB", "32G B", "32gi", "400m", "Gi", "-1Gi", "32Gb")
        ),
        *((f"memory={amount}", "too little for a worker") for amount in ("32", "400", "0Gi", "1e3", "4k")),
        *((f"cpu={amount}", "a number of cores is needed") for amount in ("8 cores", "-1", "0", "8k", "m", "all")),
    ],
)
def test_amounts_that_kubernetes_does_not_know(option, said, capsys):
    args = ["launch", "--workers=2", "--render=kubernetes", "--image=i", f"--render_option={option}", "x.py"]
    assert cli.main(args) == 2
    assert said in capsys.readouterr().err


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12))
def test_yaml_holds_any_variable(value):
    worker, _ = worker_and_volumes(render("kubernetes", job(image="i", variables={"NO": value})))
    found = {variable["name"]: expand(variable["value"]) for variable in worker["env"]}
    assert found["NO"] == value and found["TFDIST_WORKERS"] == "2"


def test_bash_holds_any_variable():
    variables = {f"V{number}": value for number, value in enumerate(ARGUMENTS)}
    script = render("slurm", job(variables={**variables, "PYTHONUNBUFFERED": "0"}))
    ask = "srun() { printenv --null; }\nsqueue() { :; }\n" + script
    done = subprocess.run(["bash", "-c", ask], capture_output=True, timeout=20, check=True)
    found = dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0")[:-1])
    assert {name: found[name] for name in variables} == variables and found["PYTHONUNBUFFERED"] == "0"


def test_variables_come_from_the_option_or_from_the_environment():
    assert carried("slurm", ["A=b=c", "B", "C="], {"B": "here", "A": "x"}) == {"A": "b=c", "B": "here", "C": ""}
    with pytest.raises(UsageError, match="B is not set here"):
        carried("slurm", ["B"], {})


@pytest.mark.parametrize("system", ["slurm", "kubernetes"])
@pytest.mark.parametrize(("name", "value"), [("MY_API_KEY", "xyzzy"), ("PROXY", "http://me:xyzzy@proxy")])
def test_secrets_are_never_written_unasked(system, name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    args = ["launch", "--workers=2", f"--render={system}", *(["--image=i"] if system == "kubernetes" else []), "x.py"]
    assert cli.main([*args[:-1], f"--env={name}", "x.py"]) == 2
    out, err = capsys.readouterr()
    assert f"--env={name}: its value seems to be a secret" in err and "xyzzy" not in out + err
    assert cli.main([*args[:-1], f"--env={name}={value}", "x.py"]) == 0
    out, err = capsys.readouterr()
    assert value in out and f"--env={name}=...: the value, which seems to be a secret" in err and "xyzzy" not in err
