"""The fuzzer on fixed programs, on programs that failed once, and on faults that it must notice."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import generate, judge, mutants, shrink
from fuzz.executors import EXECUTORS
from fuzz.program import Hook, Place, Plain, Program, Run, read
from fuzz.regressions import REGRESSIONS
from fuzz.subject import Subject

pytestmark = [
    pytest.mark.on_cpu(reason="`make fuzz` has a device of its own"),
    pytest.mark.filterwarnings("ignore"),  # those of generated programs are no errors: they ask for odd things
]

QUICK = {"uncompiled", "deferred"}
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_fixed_programs(part) -> None:
    for seed in range(part, 300, PARTS):
        program, subject = generate.program(seed)
        expected = judge.by_hand(subject, program)
        if isinstance(expected, judge.Verdict):
            continue
        for executor in EXECUTORS:
            if executor.name in QUICK and executor.takes(program):
                verdict = judge.judge(subject, program, executor, expected)
                assert verdict.kind in ("agrees", "refused"), judge.script(program, executor.name, verdict.text)


@pytest.mark.parametrize("number", range(len(REGRESSIONS)), ids=[text.replace(" ", "_") for text, _, _ in REGRESSIONS])
def test_regressions(number) -> None:
    _, name, program = REGRESSIONS[number]
    executor = next(executor for executor in EXECUTORS if executor.name == name)
    subject = Subject(program.network)
    expected = judge.by_hand(subject, program, is_clear=True)
    assert not isinstance(expected, judge.Verdict), expected
    assert judge.judge(subject, program, executor, expected) == judge.AGREES


def test_programs_are_the_same_whenever_they_are_made() -> None:
    for seed in range(6):
        assert generate.program(seed)[0] == generate.program(seed)[0]


def test_a_program_reads_back_as_it_was_printed() -> None:
    for seed in range(20):
        program = generate.program(seed)[0]
        assert read(repr(program)) == program


def test_every_fault_fits_the_library() -> None:
    mutants.checked()


def wrong(monkeypatch) -> None:
    """Let every hook of the library change more than it says."""
    from fuzz import library

    original = library.function
    monkeypatch.setattr(library, "function", lambda hook: lambda x: 2 * original(hook)(x))


NETWORK = Plain(
    (("m0", "nn.Linear(8, 8)"), ("m1", "nn.ReLU()")),
    ("v0 = self.m0(x)", "v1 = self.m1(v0)", "v2 = v1 * 2", "return v2"),
    (("x", "torch.randn(2, 3, 8)"),),
)


def test_a_failure_is_shrunk_to_what_causes_it(monkeypatch) -> None:
    wrong(monkeypatch)
    hook, other = Hook(Place("m0", "m0"), "half"), Hook(Place("m1.input", "m1", "input"), "half")
    program = Program(NETWORK, (Run(seed=3), Run((hook, other), reads="all", mode="grad"), Run()))
    executor = EXECUTORS[0]
    subject = Subject(program.network)
    expected = judge.by_hand(subject, program)
    failure = judge.judge(subject, program, executor, expected)
    assert failure.kind == "fails"
    smaller = judge.smaller(program, executor, failure)
    assert len(smaller.steps) == 1
    assert len(smaller.steps[0].hooks) == 1
    assert len(smaller.network.lines) < len(NETWORK.lines)


def test_the_script_of_a_failure_runs_alone(monkeypatch, capsys) -> None:
    wrong(monkeypatch)
    program = Program(NETWORK, (Run((Hook(Place("m0", "m0"), "half"),)),))
    text = judge.script(program, "uncompiled", "output differs")
    with pytest.raises(SystemExit) as ended:
        exec(text, {})
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("fails: 0 output")
    monkeypatch.undo()
    with pytest.raises(SystemExit) as ended:
        exec(text, {})
    assert ended.value.code == 0


def test_without_a_context_its_leave_goes_too() -> None:
    from fuzz.program import Enter, Leave

    steps = (Enter(()), Enter(()), Leave(), Run(), Leave())
    assert shrink.without_leave(steps, 0) == (Enter(()), Leave(), Run())
