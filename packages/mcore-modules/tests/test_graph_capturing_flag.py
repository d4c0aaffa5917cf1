import threading

import pytest

from mcore.modules.graphs import graph_capturing, is_graph_capturing


def test_flag_is_on_inside_the_block_only():
    assert is_graph_capturing() is False
    with graph_capturing():
        assert is_graph_capturing() is True
        with graph_capturing():
            assert is_graph_capturing() is True
        assert is_graph_capturing() is True
    assert is_graph_capturing() is False


def test_an_exception_ends_the_capture():
    with pytest.raises(ArithmeticError), graph_capturing():
        raise ArithmeticError
    assert is_graph_capturing() is False


def test_other_threads_do_not_capture():
    seen = []
    with graph_capturing():
        thread = threading.Thread(target=lambda: seen.append(is_graph_capturing()))
        thread.start()
        thread.join()
    assert seen == [False]
