"""Prints the oldest versions of JAX, Optax and Flax that pyproject.toml admits, for pip."""

import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
requirements = [*project["dependencies"], *project["optional-dependencies"]["flax"]]
for requirement in requirements:
    print(re.sub(r">=", "==", requirement))
