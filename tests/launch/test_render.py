"""`tfdist launch --render`: job files that parse, say what was asked for, and hold any argument."""

import os
import shlex
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tfdist import cli
from tfdist.cluster import Cluster
from tfdist.errors import UsageError
from tfdist.launch.render import Job, render

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
        ("nomad", {}, "--render='nomad': choose one of slurm, kubernetes"),
        ("kubernetes", {}, "--image is missing"),
        ("kubernetes", {"image": "i", "options": ("partition=gpu",)}, "name, namespace, service_account, cpu, memory"),
        ("kubernetes", {"image": "i", "options": ("name=My Job",)}, "name='My Job': a name of at most 40 lower"),
        ("slurm", {"image": "i"}, "--image='i' is for --render=kubernetes"),
        ("slurm", {"max_restarts": 2}, "--max_restarts=2: Slurm"),
        ("slurm", {"options": ("-p gpu",)}, "'-p gpu': a long option of sbatch"),
        ("slurm", {"options": ("ntasks=3",)}, "'ntasks=3': tfdist writes this option itself"),
        ("slurm", {"options": ("comment=a\n#SBATCH --wrap=x",)}, "no quotes, backslashes, # or line breaks"),
        ("slurm", {"options": ('comment="',)}, "no quotes"),
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
            "that this command starts; leave it out with --render=slurm",
        ),
        (["--render=slurm", "--hosts=h1"], "--hosts='h1' is for workers that this command starts"),
        (["--render=slurm", "--pin=1"], "--pin=1 is for workers that this command starts"),
        (["--render=slurm", "--pin=0"], "--pin=0 is for workers that this command starts"),
        (["--render=slurm", "--min_workers=1"], "--min_workers=1 is for workers that this command starts"),
        (["--render=kubernetes", "--health_check=true"], "--health_check='true' is for workers that this command"),
        (["--render=slurm", "--restart_window=3600"], "--restart_window=3600.0 is for workers that this command"),
        (
            ["--render=kubernetes", "--hang_timeout=30"],
            "--hang_timeout=30.0 is for workers that this command starts; with --render=kubernetes give it to the "
            "script, after its name",
        ),
        (["--render=slurm", "--max_restarts=1"], "--max_restarts=1: Slurm"),
        (["--gpus=0"], "--gpus=0 is for job files"),
        (["--image=i"], "--image='i' is for job files; add --render=slurm or --render=kubernetes"),
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
