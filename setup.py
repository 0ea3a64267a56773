"""Package definition; the settings of the tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="megatron-eopt",
    version="0.1.0.dev0",
    description="Muon and its relatives for Megatron-Core: tensor-parallel, exact, resumable, nothing silent",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_eopt", "megatron_eopt.*"]),
    package_data={"megatron_eopt": ["py.typed"]},
    entry_points={"console_scripts": ["megatron-eopt = megatron_eopt.cli:main"]},
    # pyyaml and psutil are Megatron's, which does not declare them: psutil to save, pyyaml up to 0.18
    install_requires=["torch>=2.6", "megatron-core>=0.17", "psutil", "pyyaml"],
    extras_require={
        # What Megatron-FSDP needs and megatron-core does not declare (einops), and our own tests.
        "test": [
            "einops",
            "emerging-optimizers==0.3.0",
            "hypothesis",
            "matplotlib",
            "mkdocs",
            "mkdocstrings[python]",
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff",
            "schedulefree",
            "tensorboard",
        ],
        "plot": ["matplotlib", "tensorboard"],
        "te": ["transformer-engine[pytorch]"],
        "docs": ["mkdocs", "mkdocstrings[python]"],
    },
)
