"""The jobs of real worker processes that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.multi_worker.harness import Jobs, Kind


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu_devices: list) -> Iterator[Jobs]:
    """Starts one job for each number of workers, with the bodies of all tests of this run that need it."""
    cases: dict[Kind, list[str]] = {}
    for item in request.session.items:
        name = getattr(getattr(item, "function", None), "case", None)
        if name is not None:
            cases.setdefault(item.function.kind(item.callspec.params["count"]), []).append(name)
    jobs = Jobs(tmp_path_factory.mktemp("jobs"), cases)
    yield jobs
    jobs.close()
