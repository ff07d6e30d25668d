"""The hostile directories of the campaign: nearly all of them in this process, and a few to the tools."""

import pytest

from ppfleetx.checkpoint.directory import open_resolved, resolve_checkpoint
from ppfleetx.config.errors import UserError
from ppfleetx.conversion.convert import Conversion, convert, load_model_section
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.faults.hostile_campaign import Programs, campaign
from tests.faults.hostile_files import FLEETX, OURS, TOKENIZER, all_cases

# For the tools: some that are accepted, and of each kind one that is not.
SOME = (
    "sound: hf_pickled",
    "sound: fleetx",
    "sound: megatron",
    "sound: tokenizer",
    "index: a missing shard",
    "pdparams, attack: posix.system",
    "bin, attack: builtins.eval",
    "no byte for epoch_0_step_1/manifest.json",
    "vocabulary: a list of tokens",
    "a pipe for config.json",
    "no byte for model.pdparams",
)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """The `Model` section that FleetX's directories need beside them."""
    work = tmp_path_factory.mktemp("network")
    Programs(work)
    return load_model_section(work / "network.yaml")


def use(case, directory, network, output):
    """What a tool does with a directory of the kind that the case pretends to be."""
    if case.kind == TOKENIZER:
        Tokenizer.load(directory).encode("some text")
    elif case.kind == OURS:
        checkpoint = open_resolved(resolve_checkpoint(directory))
        for name in checkpoint.names():
            checkpoint.read(name)
    else:
        convert(
            Conversion(case.kind, "ppfleetx", directory, output, network if case.kind == FLEETX else None)
        )


def test_every_hostile_directory_is_refused_in_words(tmp_path, network):
    """An exception that is not the user's fails, and so does a case that is accepted though it is wrong."""
    canary, accepted = tmp_path / "canary", []
    cases = all_cases(canary, seed=0)
    assert sum(not case.is_sound for case in cases) >= 100
    for number, case in enumerate(cases):
        directory = tmp_path / f"{number}"
        directory.mkdir()
        case.make(directory)
        try:
            use(case, directory, network, tmp_path / f"{number}-out")
        except UserError as error:
            assert not case.is_sound, (case.name, str(error))
            assert 20 < len(str(error)) < 2500, (case.name, len(str(error)))
        else:
            accepted.append(case)
    wrong = [case.name for case in accepted if not (case.is_sound or case.may_pass)]
    assert not wrong and len(accepted) < len(cases) / 8
    assert not canary.exists()


def test_the_tools_refuse_them(tmp_path):
    canary = tmp_path / "canary"
    cases = {case.name: case for case in all_cases(canary, seed=0)}
    outcomes, problems = campaign([cases[name] for name in SOME], tmp_path, paddle_every=0)
    assert not problems
    assert outcomes.total() >= len(SOME)
    assert not canary.exists()
