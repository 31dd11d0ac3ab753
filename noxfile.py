"""nox: the tests under the oldest and newest releases of what megazero stands on (make test-releases; CI's matrix).

    nox                                        # all: some 20 GB under .nox, two hours on 2 cores
    nox -s tests-3.13 -- tests/unit            # the newest releases; of the tests these
    nox -s wheel -- torch==2.13.0              # a wheel, beside this torch

torch comes from the package index, mostly as a CUDA build, which runs on a CPU, too. nox finds pythonX.Y on the PATH.
"""

import nox

# By Python: requirements, and megatron-core's version, whose own dependencies the compared parts do not need. The
# first are setup.cfg's lower bounds.
RELEASES = {
    "3.11": (
        "torch==2.11.* transformers==4.52.* tokenizers==0.21.* numpy==1.26.* pyyaml==6.* rich==13.* "
        "safetensors==0.4.* sentencepiece==0.2.*",
        "0.16.1",
    ),
    "3.12": ("torch==2.14.1 transformers==5.23.0", "0.19.2"),
    "3.13": ("torch==2.15.0 transformers==5.23.0", "0.19.2"),
}
TESTS = ("tests/unit", "tests/gpu", "tests/dist", "tests/megatron", "tests/fsdp2")
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64"
TRAIN = f"{MODEL} --lr 1e-3 --mock-data --micro-batch-size 1 --save run --load run --train-iters"


@nox.session(python=list(RELEASES))
def tests(session: nox.Session) -> None:
    """Run the always-run tests, or those that stand after ``--``."""
    requirements, megatron = RELEASES[str(session.python)]
    session.install(*requirements.split(), "--editable", ".[test]")
    session.install("--no-deps", f"megatron-core=={megatron}")
    options = ("-m", "not slow and not gpu", "-n", "2", "--dist", "loadfile")
    session.run("python", "-m", "pytest", *options, *(session.posargs or TESTS))


@nox.session(python="3.11")
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel, install the wheel alone, plan, train in an empty folder, and resume on two ranks."""
    place = session.create_tmp()
    session.install("build", *session.posargs)
    session.run("python", "-m", "build", "--outdir", f"{place}/dist", ".")
    session.cd(place)
    session.run("sh", "-c", "python -m pip install --quiet dist/*.whl", external=True)
    session.run("megazero", "plan", *MODEL.split(), "--global-batch-size", "4", "--cluster", "two-nodes-10g")
    session.run("megazero", "train", *TRAIN.split(), "20")
    session.run("megazero", "train", *TRAIN.split(), "24", "--nproc-per-node", "2")
    session.run("python", "-c", "import fsdp2_patch.patch, megatron_core_patch.patch")
