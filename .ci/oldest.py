"""Prints the oldest versions of JAX, Optax, Flax and Jinja2 that pyproject.toml admits, for pip."""

import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["flax"], *extras["doctor"]]:
    if not requirement.startswith("jaxscale["):  # a constraint has no extras
        print(re.sub(r">=", "==", requirement))
