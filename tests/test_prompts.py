"""Prompts: exact lengths, parts that do not overlap, nothing shared, nothing leaked."""

import secrets

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kernels.errors import InputError
from profiles import prompts


def bpe(vocabulary: int = 2000, bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(prompts.paragraphs()[:800], trainer)
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(scope="module")
def source() -> prompts.PromptSource:
    return prompts.PromptSource(bpe())


def test_lengths_are_exact_and_seeds_repeat(source):
    for length in (1, 3, 17, 128, 5000):
        assert {len(p) for p in source.visible(1, 3, length)} == {length}
    assert [len(p) for p in source.visible(1, 3, [5, 9, 200])] == [5, 9, 200]
    assert source.visible(7, 4, 64) == source.visible(7, 4, 64)
    assert source.visible(7, 4, 64) != source.visible(8, 4, 64)
    secret = secrets.token_bytes(32)
    assert source.hidden(secret, 2, 64) == source.hidden(secret, 2, 64)
    assert source.hidden(secret, 2, 64) != source.hidden(secrets.token_bytes(32), 2, 64)


def test_a_prompt_longer_than_the_text_wraps(source):
    length = len(source._stream("visible")) + 100
    (prompt,) = source.visible(0, 1, length)
    assert len(prompt) == length


def test_no_two_prompts_share_more_than_the_first_tokens(source):
    drawn = [p for seed in range(40) for p in source.visible(seed, 8, 64)]
    drawn += [p for _ in range(20) for p in source.hidden(secrets.token_bytes(32), 8, 64)]
    assert len({p[:12] for p in drawn}) == len(drawn)
    assert len({p[0] for p in drawn}) > 20


def test_parts_are_disjoint_and_texts_are_english(source):
    parts = {"visible": "", "hidden": "", "held_out": ""}
    for paragraph in prompts.paragraphs():
        parts[prompts.part_of(paragraph)] += paragraph + "\n\n"
    assert min(len(text) for text in parts.values()) > 100_000
    decode = source._tokenizer.decode
    for part, drawn in (
        ("visible", source.visible(3, 20, 96)),
        ("hidden", source.hidden(b"0123456789abcdef", 20, 96)),
        ("held_out", source.held_out(20, 96)),
    ):
        for prompt in drawn:
            middle = decode(prompt[40:80])
            assert middle in parts[part], (part, middle)
            assert not any(middle in text for other, text in parts.items() if other != part)


def test_the_same_paragraph_is_in_one_part_however_it_is_wrapped():
    paragraph = prompts.paragraphs()[5]
    assert prompts.part_of(paragraph) == prompts.part_of(paragraph.replace(" ", "\n  ").upper())


def test_beginning_of_sequence_only_where_the_tokenizer_puts_one(source):
    with_bos = prompts.PromptSource(bpe(bos=True))
    assert {p[0] for p in with_bos.visible(1, 3, 20)} == {0}
    assert with_bos.held_out(1, 20)[0][0] == 0
    assert len({p[:7] for p in with_bos.visible(1, 30, 20)}) == 30
    assert 0 not in {p[0] for p in source.visible(1, 30, 20)}


def test_bad_input_names_what_is_wrong(source):
    with pytest.raises(InputError, match="secret"):
        source.hidden(b"short", 1, 8)
    for n, length in ((0, 8), (2, 0), (2, [4])):
        with pytest.raises(InputError, match="length"):
            source.visible(1, n, length)
    unknown = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    unknown.pre_tokenizer = pre_tokenizers.Whitespace()
    broken = prompts.PromptSource(PreTrainedTokenizerFast(tokenizer_object=unknown, unk_token="[UNK]"))
    with pytest.raises(InputError, match="tokenizer"):
        broken.visible(1, 1, 8)
