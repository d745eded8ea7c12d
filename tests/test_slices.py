"""`make quick` leaves no file out and takes one family of each test; versions share the cases of contract tests."""

from slices import shared_out, sliced, spread

TESTS = [("a.py::one[llama]", "llama"), ("a.py::one[gemma]", "gemma"), ("a.py::two", ""), ("a.py::three", "")]
OTHER = [("b.py::one[gemma]", "gemma"), ("b.py::one[llama]", "llama")]


def test_every_file_has_a_test_in_the_slice_and_each_test_one_family():
    assert sliced(TESTS + OTHER, 6) == ["a.py::one[llama]", "b.py::one[gemma]"]
    assert sliced(TESTS, 2) == ["a.py::one[llama]", "a.py::three"]
    assert sliced(TESTS, 1) == ["a.py::one[llama]", "a.py::two", "a.py::three"]


CASES = [f"a.py::one[{name}-{rows}]" for name in ("llama", "gemma", "qwen", "phi") for rows in (1, 3)]


def test_each_case_is_in_one_share_and_a_test_without_cases_in_both():
    first, second = (shared_out([*CASES, "a.py::two"], share) for share in (0, 1))
    assert set(first) & set(second) == {"a.py::two"}
    assert sorted({*first, *second}) == sorted([*CASES, "a.py::two"])
    assert len(first) == len(second) == 5
    for share in (first, second):
        assert {case[-2] for case in share if "[" in case} == {"1", "3"}, "not by the order of parameters"


def test_of_cases_marked_so_one_in_three_is_run_and_unmarked_tests_are_whole():
    marked = [(case, 3) for case in CASES] + [("a.py::two", 1), ("a.py::three", 0), ("b.py::one[x]", 3)]
    kept = spread(marked)
    assert len(set(kept) & set(CASES)) == 3
    assert set(kept) - set(CASES) == {"a.py::two", "b.py::one[x]"}
