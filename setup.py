"""Lists the packages; everything else is in pyproject.toml.

The folder services/ is installed as `headrace_services`: a top-level package `services` would shadow, or be shadowed by, a user's own.
pyproject.toml can't say this for subpackages that are found rather than listed. examples/ is installed too, for `headrace demo`.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["headrace", "headrace.*"]),
        "headrace_examples",
        "headrace_services",
        *(f"headrace_services.{name}" for name in find_packages("services")),
    ],
    package_dir={"headrace_examples": "examples", "headrace_services": "services"},
)
