import pytest

from mcore.observe.straggler.sections import check_sections, section_hash


def test_built_in_kinds_come_first():
    assert check_sections(()) == ("compute", "data")
    assert check_sections(["b", "a"]) == ("compute", "data", "b", "a")


def test_64_are_allowed():
    assert len(check_sections([f"s{i}" for i in range(64)])) == 66
    with pytest.raises(ValueError, match="65 sections; at most 64"):
        check_sections([f"s{i}" for i in range(65)])


@pytest.mark.parametrize("names", [["a", "b", "a"], ["data"], [""], [3], "ab"])
def test_names_that_cannot_be(names):
    with pytest.raises(ValueError, match="section"):
        check_sections(names)


def test_hash_fits_a_float_and_sees_order_and_borders():
    hashes = [section_hash(names) for names in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""])]
    assert len(set(hashes)) == 4
    assert all(0 <= value < 2**52 and value == int(value) for value in hashes)
