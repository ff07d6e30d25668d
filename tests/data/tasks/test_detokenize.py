"""Detokenisers of the perplexity benchmarks."""

import pytest

from ppfleetx.data.tasks.detokenize import detokenizer, detokenizer_of_file

# Written by hand from the published files' conventions.
WIKITEXT = [
    (" The @-@ cat 's 1 @,@ 000 . 5 @.@ 2 ", " The-cat's 1,000. 5.2 "),
    ("the dogs ' house", "the dogs' house"),
    ("a ( b ) [ c ] { d } e", "a (b) [c] {d} e"),
    ("he said \" oh no \" and ' yes ' then", "he said \"oh no\" and 'yes' then"),
    ("one , two ; three : four ! five ? six", "one, two; three: four! five? six"),
    (" \n = Title = \n \n = = Part = = \n text \n", "\n= Title =\n\n== Part ==\ntext\n"),
    ("= = = = deep = = = =", "==== deep ===="),
    ("20 \N{DEGREE SIGN} C and N people", "20\N{DEGREE SIGN}C and 1 people"),
    ("naïve <unk> 中文", "naïve <unk> 中文"),
]
PTB = [
    (" it 's n't \n for N years \n", " it'sn't\nfor1 years\n"),
    ("do n't 'em", "don't'em"),
    ("rose # N to $ 1", "rose #1 to $1"),
]


@pytest.mark.parametrize(("text", "plain"), WIKITEXT)
def test_wikitext(text: str, plain: str) -> None:
    assert detokenizer("wikitext")(text) == plain


@pytest.mark.parametrize(("text", "plain"), PTB)
def test_ptb(text: str, plain: str) -> None:
    assert detokenizer("ptb")(text) == plain


@pytest.mark.parametrize("name", ["lambada", "none"])
def test_texts_that_stay(name: str) -> None:
    text = " a , b @-@ c 's \n"
    assert detokenizer(name)(text) == text


def test_wikitext_is_the_harnesses() -> None:
    harness = pytest.importorskip(
        "lm_eval.tasks.wikitext.preprocess_wikitext", reason="needs pip install 'ppfleetx[lm_eval]'"
    )
    for text, plain in [*WIKITEXT, ("/' [0-9]/ /' 3/ s ' x ' y", None), ("( ( a ) ) \" b ' c \" d '", None)]:
        found = harness.wikitext_detokenizer({"page": text})
        assert detokenizer("wikitext")(text) == found
        assert plain in (None, found)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("wikitext-103/wiki.valid.tokens", "wikitext"),
        ("WikiText.txt", "wikitext"),
        ("data/ptb.test.txt", "ptb"),
        ("wiki/book.txt", "none"),  # the file's name counts, not its directory's
        ("lambada_test.jsonl", "none"),
    ],
)
def test_name_of_a_file(path: str, name: str) -> None:
    assert detokenizer_of_file(path) == name
