"""Environment variables that are a job's business, and those among them that hold secrets."""

import re

MONITOR = "TFDIST_MONITOR"
"""Where the workers tell of themselves, host:port/token: whoever knows it can speak for one of them."""

_OTHERS = ("TF_VAR_", "TF_CLI_", "TF_TOKEN_")  # another program's, Terraform
_SECRET = re.compile(r"JWT|TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s\"',]+@")


def begins_with(name: str, prefixes: tuple[str, ...]) -> bool:
    """Says whether a variable begins with one of `prefixes`, and is not one of another program that happens to.

    Args:
        name: The variable.
        prefixes: What to look for, such as TF_ for TensorFlow.
    """
    return name.startswith(prefixes) and not name.startswith(_OTHERS)


def is_secret(name: str, value: str) -> bool:
    """Says whether a variable seems to hold a secret: by its name, or as an address with a user and a password in it.

    Args:
        name: The variable.
        value: What it is set to.
    """
    return without_secrets(name, value) != value


def without_secrets(name: str, value: str) -> str:
    """Returns what may be shown of a variable: all of it, or what is left without the secret.

    Args:
        name: The variable.
        value: What it is set to.
    """
    if name == MONITOR:
        address, slash, _ = value.rpartition("/")
        return f"{address}/..." if slash else "(not shown)"
    return "(not shown)" if _SECRET.search(name) else _LOGIN.sub("...@", value)
