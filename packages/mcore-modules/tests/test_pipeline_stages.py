import pytest

from mcore.modules.float16 import stage_flags


@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("vp_size", [None, 1, 2, 3])
def test_exactly_one_chunk_of_the_pipeline_is_first_and_one_is_last(pp_size, vp_size):
    stages = range(vp_size) if vp_size and vp_size > 1 else [None]
    places = [(rank, stage) for stage in stages for rank in range(pp_size)]
    flags = {place: stage_flags(place[0], pp_size, place[1], vp_size) for place in places}
    assert [place for place in places if flags[place].is_first] == [places[0]]
    assert [place for place in places if flags[place].is_last] == [places[-1]]


@pytest.mark.parametrize(
    ("vp_stage", "vp_size"),
    [(1, None), (1, 1), (-1, None), (None, 2), (2, 2), (-1, 2)],
)
def test_stages_that_do_not_fit_are_refused(vp_stage, vp_size):
    with pytest.raises(ValueError, match="vp_stage is"):
        stage_flags(0, 1, vp_stage, vp_size)


def test_stage_zero_of_a_single_chunk_is_fine():
    assert stage_flags(0, 1, 0, None) == stage_flags(0, 1, None, 1) == (True, True)
