"""What the conftest adds: the mark `quick_for`, and an error for a thread that fails, even if warnings are ignored."""

import warnings

import pytest


def collected(item: pytest.Function) -> list[pytest.Function]:
    """What the conftest makes of the variants of a test: here, of one."""
    plugins = item.config.pluginmanager.get_plugins()
    check = next(each for each in plugins if hasattr(each, "_ids")).pytest_pycollect_makeitem(item.parent, item.name)
    next(check)
    with pytest.raises(StopIteration) as made:
        check.send([item])
    return made.value.value


@pytest.mark.quick_for("one")
@pytest.mark.parametrize("word", ["one"])
def test_a_word_that_no_variant_has(word, request) -> None:
    assert collected(request.node) == [request.node]
    request.node.add_marker(pytest.mark.quick_for("two"))
    with pytest.raises(pytest.Collector.CollectError, match="variant"):
        collected(request.node)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_thread_that_fails_is_no_warning_to_ignore() -> None:
    warnings.warn("of a user", UserWarning, stacklevel=1)
    with pytest.raises(pytest.PytestUnhandledThreadExceptionWarning):
        warnings.warn("of a thread", pytest.PytestUnhandledThreadExceptionWarning, stacklevel=1)
