"""Packaging of hf_icot: what users need, as ranges. The exact versions that were tested stand in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup


HERE = Path(__file__).parent

setup(
    name="hf_icot",
    version="0.1.0",
    description="Implicit chain-of-thought with Hugging Face: transformers that learn to multiply in their head",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The hf_icot team",
    packages=find_packages(include=["hf_icot", "hf_icot.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.9",  # torch.optim.Muon
        "transformers>=5.24",
        "tokenizers>=0.22",
        "datasets>=4.0",
        "accelerate>=1.12",
        "peft>=0.18",
        "evaluate>=0.4.6",
        "huggingface_hub>=1.0",
        "safetensors>=0.6",
        "numpy>=2.0",
        "pyarrow>=21.0",
        "pyyaml>=6.0",
        "tqdm>=4.66",
        "psutil>=5.9",
        "matplotlib>=3.9",  # the trainer draws its learning curve
    ],
    extras_require={
        "analysis": ["networkx>=3.4"],
        "trackers": ["tensorboard>=2.19", "trackio>=0.5", "wandb>=0.22"],
        "dev": ["pytest>=8.3", "hypothesis>=6.130", "ruff>=0.12", "tensorboard>=2.19"],
    },
    entry_points={"console_scripts": ["hf-icot=hf_icot.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
