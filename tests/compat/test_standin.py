"""hookline in place of `transformer_lens`: imports, programs, metadata. Each test has a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import forked

SRC = Path(__file__).parents[2] / "src"
SHIM = Path(__file__).parents[2] / "packages" / "transformer-lens" / "src"
RUN = (sys.executable, "-m", "hookline.compat.transformer_lens")
INSTALL = "from hookline.compat.transformer_lens import install; install()\n"


def run(*command: str, path: tuple[Path, ...] = (SRC,)) -> subprocess.CompletedProcess:
    env = {"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


def ok(code: str, *, path: tuple[Path, ...] = (SRC,)) -> str:
    done = run(sys.executable, "-c", code, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


CHECKS = """
import importlib.metadata as metadata
import transformer_lens, transformer_lens.utils as u
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedTransformer import HookedRootModule, HookedTransformer, Loss, Output
from transformer_lens.components.mlps.can_be_used_as_mlp import CanBeUsedAsMLP
import hookline.compat.transformer_lens as ours
import hookline.compat.transformer_lens.hook_points as points
assert transformer_lens is ours and u is ours.utils and HookPoint is points.HookPoint
assert transformer_lens.HookedTransformer is HookedTransformer, "the class, not the module"
assert metadata.version("transformer-lens").startswith("3.5.1"), metadata.version("transformer-lens")
assert metadata.version("transformer_lens") == transformer_lens.__version__
assert ours.__spec__.name == "hookline.compat.transformer_lens"
"""


MAIN = "import runpy; runpy.run_module('hookline.compat.transformer_lens', run_name='__main__', alter_sys=True)"
BAD = [(), ("-m",), ("-x",), ("missing.py",)]
FORKED = (*((MAIN, each) for each in BAD), (INSTALL + CHECKS + "install()\n" + CHECKS, ()))


def test_every_path_gives_the_same_objects() -> None:
    done = forked(FORKED)[-1]
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_distribution_in_packages_does_the_same() -> None:
    ok(CHECKS, path=(SHIM, SRC))
    ok(INSTALL + CHECKS, path=(SHIM, SRC))


@pytest.mark.slow
def test_uninstalling_restores_the_imports() -> None:
    ok(
        "from hookline.compat.transformer_lens import install\nundo = install()\nimport transformer_lens\nundo()\n"
        "import importlib.util\nassert importlib.util.find_spec('transformer_lens') is None"
    )


def test_it_refuses_if_another_transformer_lens_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "transformer_lens.py").write_text("")
    done = run(sys.executable, "-c", "import transformer_lens\n" + INSTALL, path=(tmp_path, SRC))
    assert done.returncode == 1
    assert "HooklineError" in done.stderr
    assert str(tmp_path) in done.stderr
    ok(INSTALL + CHECKS, path=(tmp_path, SRC))  # installed on disk only, it is hidden


@pytest.mark.slow
def test_names_that_other_packages_no_longer_have() -> None:
    ok(
        INSTALL + "from huggingface_hub.constants import HF_HUB_ENABLE_HF_TRANSFER\n"
        "from transformers.models.gpt2.tokenization_gpt2_fast import GPT2TokenizerFast as moved\n"
        "from transformers import GPT2TokenizerFast\nassert moved is GPT2TokenizerFast"
    )


@pytest.mark.slow
def test_it_refuses_an_older_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "transformers-4.57.3.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.3\n")
    for code in (INSTALL, "import hookline; hookline.load('tinyworld')"):
        done = run(sys.executable, "-c", code, path=(tmp_path, SRC))
        assert "HooklineError: hookline needs transformers 5, not 4.57.3: pip install -U" in done.stderr


@pytest.mark.slow
def test_a_module_that_we_do_not_have_is_not_found() -> None:
    done = run(sys.executable, "-c", INSTALL + "import transformer_lens.lit")
    assert "ModuleNotFoundError" in done.stderr
    assert "hookline" in done.stderr


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("import transformer_lens\nNAME = transformer_lens.__name__\n")
    path = tmp_path / "program.py"
    path.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.NAME)\nsys.exit(int(sys.argv[1]))\n")
    return path


def test_a_script_runs_with_its_arguments_and_exit_code(script: Path) -> None:
    done = run(*RUN, str(script), "3", "--flag")
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == "__main__ ['3', '--flag'] hookline.compat.transformer_lens"


@pytest.mark.slow
def test_a_module_runs_with_its_arguments_and_exit_code(script: Path) -> None:
    done = run(*RUN, "-m", "program", "4", path=(SRC, script.parent))
    assert done.returncode == 4, done.stderr
    assert done.stdout.strip() == "__main__ ['4'] hookline.compat.transformer_lens"


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_end_with_a_message(arguments: tuple[str, ...]) -> None:
    done = forked(FORKED)[BAD.index(arguments)]
    assert done.returncode == 2
    assert done.stderr
