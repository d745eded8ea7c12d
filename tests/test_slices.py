"""`make quick` leaves no file out and takes one model family of each test."""

from slices import sliced

TESTS = [("a.py::one[llama]", "llama"), ("a.py::one[gemma]", "gemma"), ("a.py::two", ""), ("a.py::three", "")]
OTHER = [("b.py::one[gemma]", "gemma"), ("b.py::one[llama]", "llama")]


def test_every_file_has_a_test_in_the_slice():
    assert sliced(TESTS + OTHER, 6) == ["a.py::one[llama]", "b.py::one[gemma]"]


def test_every_second_test_of_a_file():
    assert sliced(TESTS, 2) == ["a.py::one[llama]", "a.py::three"]


def test_a_slice_of_one_leaves_only_families_out():
    assert sliced(TESTS, 1) == ["a.py::one[llama]", "a.py::two", "a.py::three"]
