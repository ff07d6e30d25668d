"""A hostile data file of each kind, and a few flips: the campaign is run whole from the command line."""

from tests.faults.data_campaign import flip_campaign, hostile_campaign
from tests.faults.hostile_data import MAKERS


def test_hostile_data_files_end_in_words(tmp_path):
    ends, failures = hostile_campaign(tmp_path, len(MAKERS), seed=11)
    assert not failures, "\n".join(failures)
    assert ends.total() == len(MAKERS)


def test_every_flipped_bit_of_a_corpus_is_found(tmp_path):
    assert flip_campaign(tmp_path, 4, seed=2).total() == 4
