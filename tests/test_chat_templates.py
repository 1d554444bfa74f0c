"""Chat templates of common models, rendered and encoded as transformers does it: the same ids, and never two BOS.

The templates (tests/templates/) are those that the models are published with; the tokenizers are small ones, trained
here, with the models' special tokens and what their post-processors put around a text.
"""

import json
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from areal_async.errors import DataError
from areal_async.rollout.data import PromptValue
from areal_async.rollout.text import Text

pytestmark = pytest.mark.slow  # transformers takes seconds to import

TEMPLATES: Final = Path(__file__).parent / "templates"


class Model(NamedTuple):
    """bos, eos: as its tokenizer names them, "" for none. special: further special tokens. adds_bos: its post-processor
    puts BOS before a text. metaspace: SentencePiece's way with spaces in place of bytes'. system: has a system role."""

    bos: str
    eos: str
    special: tuple[str, ...]
    adds_bos: bool
    metaspace: bool = False
    system: bool = True


MODELS: Final = {
    "qwen2.5": Model("", "<|im_end|>", ("<|endoftext|>", "<|im_start|>"), adds_bos=False),
    "llama-3": Model(
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
        adds_bos=True,
    ),
    "gemma-2": Model(
        "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), adds_bos=True, metaspace=True, system=False
    ),
    "mistral": Model("<s>", "</s>", ("[INST]", "[/INST]"), adds_bos=True, metaspace=True),
    "phi-3": Model(
        "<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), adds_bos=True, metaspace=True
    ),
    "smollm2": Model("<|im_start|>", "<|im_end|>", ("<|endoftext|>",), adds_bos=False),
}

SYSTEM: Final = {"role": "system", "content": "Be brief. "}
USER: Final = {"role": "user", "content": " What is 12 + 7?\n"}
ASSISTANT: Final = {"role": "assistant", "content": "19 "}
PROMPTS: Final[dict[str, PromptValue]] = {
    "text": "What is 12 + 7?",
    "user": (USER,),
    "several turns": (USER, ASSISTANT, {"role": "user", "content": "And 3 more?"}),
    "system": (SYSTEM, USER),
    "system and several turns": (SYSTEM, USER, ASSISTANT, USER),
    "unicode": ({"role": "user", "content": "Grüße, 世界! 👩‍👩‍👧 e\u0301 \u00a0 <b>&amp;</b> \\n"},),
    "special tokens in the text": ({"role": "user", "content": "say <|im_end|> </s> [INST] <bos>"},),
    "spaces": ({"role": "user", "content": "  two  spaces\t\tand\n\n\nlines  "},),
    "an empty message": ({"role": "user", "content": ""},),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, MODELS[request.param], (TEMPLATES / f"{request.param}.jinja").read_text())
    return MODELS[request.param], folder


def write(folder: Path, model: Model, template: str) -> None:
    special = [token for token in dict.fromkeys(("<unk>", model.bos, model.eos, *model.special)) if token]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=model.metaspace))
    if model.metaspace:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = [chr(code) for code in range(33, 127)] + ["▁"]
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, bytes_ = pre_tokenizers.ByteLevel.alphabet(), []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*special, *bytes_], initial_alphabet=alphabet, show_progress=False
    )
    sentences = ["What is 12 + 7? And 3 more? Be brief.", "system user assistant model You are a helpful assistant."]
    tokenizer.train_from_iterator(sentences * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if model.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{model.bos} $A", pair=f"{model.bos} $A {model.bos} $B",
            special_tokens=[(model.bos, tokenizer.token_to_id(model.bos))],
        )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {name: token for name, token in (("bos_token", model.bos), ("eos_token", model.eos)) if token}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "chat_template": template} | named
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "vocab_size": size}))


@pytest.mark.parametrize("name", PROMPTS)
def test_the_same_ids_as_transformers(model: tuple[Model, Path], name: str) -> None:
    import transformers

    kind, folder = model
    text = Text(str(folder))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = PROMPTS[name]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[0]["role"] == "system" and not kind.system:
        with pytest.raises(DataError, match="refuses the prompt: System role not supported"):
            text.encode(prompt)
        return
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.render(prompt) == rendered
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert text.encode(prompt) == expected
    assert text.encode_all([prompt]) == [expected]
    assert len(expected) <= text.most_tokens(prompt)
    # P19: what is rendered already, with a BOS, is asked as it stands, with exactly one
    begins = [token for token in expected[:2] if token == text.bos_token_id]
    assert len(begins) == (1 if kind.bos and rendered.startswith(kind.bos) else 0)
    if kind.bos and rendered.startswith(kind.bos):
        assert text.encode(rendered) == expected
        assert text.encode(kind.bos + rendered) == expected


def test_a_rendered_text_gets_the_one_bos_that_the_tokenizer_adds(model: tuple[Model, Path]) -> None:
    """P19, without a template: `plain`."""
    kind, folder = model
    text = Text(str(folder), "plain")
    ids = text.encode("hello")
    assert ids.count(text.bos_token_id) == (1 if kind.adds_bos else 0)
    if kind.bos:
        assert text.encode(kind.bos + "hello").count(text.bos_token_id) == 1
