"""Rendering and encoding, held against transformers' own for tokenizers that are made here."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from areal_async.errors import ConfigError, DataError
from areal_async.rollout.text import Text

CHAT = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] not in ['system', 'user', 'assistant'] %}
        {{ raise_exception('no such role: ' + message['role']) }}
    {% endif %}
<|{{ message['role'] }}|>
{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if tools is not none %}tools{% endif %}
{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ {'a<b': 'é', 'n': x} | tojson(indent=2) }}{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
NO_BOS = CHAT.replace("{{ bos_token }}", "")
MESSAGES = ({"role": "system", "content": "be brief "}, {"role": "user", "content": "1+2 <é>?\n"})
PLAIN = ["hello world", "", " 1+2=", "<s>hello", "<s><s>hello", "hello</s>", "a\nb", "日本"]


def make_model(folder: Path, template: str | None = None, bos: bool = True, eos: bool = False, **settings) -> str:
    """A byte-level BPE tokenizer with <s> and </s>; bos, eos: what its post-processor adds to a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, hello there, the user asks the assistant"], trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    single = " ".join(["<s>"] * bos + ["$A"] + ["</s>"] * eos)
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer.enable_truncation(4)  # files say such things; nothing may be cut because of it
    tokenizer.enable_padding(length=64, pad_id=2, pad_token="<pad>")
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder / "config.json", {"model_type": "qwen2", "max_position_embeddings": 128, "vocab_size": 320} | settings)
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "pad_token": "<pad>"}
    named = {"chat_template": template} if template is not None else {}
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | special | named)
    return str(folder)


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def theirs(folder: str):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("template", [CHAT, NO_BOS])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("prompt", [MESSAGES, "hello world"])
def test_chat_like_transformers(tmp_path, template, bos, prompt):
    folder = make_model(tmp_path, template, bos=bos)
    text, reference = Text(folder), theirs(folder)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    assert text.render(prompt) == reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert text.encode(prompt) == ids
    assert ids.count(0) == (template == CHAT)  # transformers' own gives one BOS here, or the template wants none
    assert text.encode_all([prompt, prompt]) == [ids, ids]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("prompt", PLAIN)
def test_plain_like_transformers_but_one_bos_and_no_eos(tmp_path, bos, eos, prompt):
    text = Text(make_model(tmp_path, None, bos=bos, eos=eos))
    ids = theirs(str(tmp_path)).encode(prompt)
    if eos:
        assert ids.pop() == 1
    while ids[:2] == [0, 0]:
        del ids[0]
    if not ids:
        with pytest.raises(DataError, match="the prompt has no tokens"):
            text.encode(prompt)
    else:
        assert text.encode(prompt) == ids
        assert text.encode_all([prompt]) == [ids]
        assert text.render(prompt) == prompt
        assert ids[:1].count(0) == (bos or "<s>" in prompt)


def test_a_rendered_string_is_not_rendered_again(tmp_path):
    """P19: text that begins with a BOS has been through a template already."""
    text = Text(make_model(tmp_path, CHAT))
    rendered = text.render(MESSAGES)
    assert text.render(rendered) == rendered
    assert text.encode(rendered) == text.encode(MESSAGES)
    assert text.encode(rendered).count(0) == 1


def test_a_template_with_two_bos_gives_one(tmp_path):
    assert Text(make_model(tmp_path, "<s>" + CHAT)).encode(MESSAGES) == Text(make_model(tmp_path, CHAT)).encode(
        MESSAGES
    )


def test_a_beginning_of_several_tokens_is_not_doubled(tmp_path):
    make_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <pad> $A", pair="<s> <pad> $A $B", special_tokens=[("<s>", 0), ("<pad>", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text(str(tmp_path))
    assert text.encode("hello")[:2] == [0, 2]
    assert text.encode("<s><pad>hello") == text.encode("hello")


def test_plain_leaves_strings_alone_and_renders_messages(tmp_path):
    folder = make_model(tmp_path, CHAT)
    plain, auto = Text(folder, "plain"), Text(folder)
    assert plain.render("1+2=") == "1+2="
    assert auto.render("1+2=") == auto.render(({"role": "user", "content": "1+2="},)) != "1+2="
    assert plain.render(MESSAGES) == auto.render(MESSAGES)


def test_the_template_file_comes_first(tmp_path):
    folder = make_model(tmp_path, CHAT)
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}{% generation %}!{% endgeneration %}")
    reference = theirs(folder).apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert Text(folder).render("x") == reference == "file x!"


def test_named_templates(tmp_path):
    make_model(tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes {{ messages[0].content }}"}]
    write(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert Text(str(tmp_path)).render("x") == "yes x"
    write(tmp_path / "tokenizer_config.json", {"chat_template": named[:1]})
    with pytest.raises(ConfigError, match="has the chat templates tool_use, but none that is named default"):
        Text(str(tmp_path))


def test_a_template_is_sandboxed_and_may_refuse(tmp_path):
    folder = make_model(tmp_path, "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(DataError, match=r"the chat template \(.*tokenizer_config.json\) refuses the prompt"):
        Text(folder).render(MESSAGES)
    with pytest.raises(DataError, match="refuses the prompt: no such role: tool"):
        Text(make_model(tmp_path, CHAT)).render(({"role": "tool", "content": "x"},))
    with pytest.raises(DataError, match="has no chat template"):
        Text(make_model(tmp_path)).render(MESSAGES)
    with pytest.raises(ConfigError, match=r"can't be compiled \(its line 2\)"):
        Text(make_model(tmp_path, "\n{% if %}"))


def test_strftime_now(tmp_path):
    folder = make_model(tmp_path, "{{ strftime_now('%Y')[:2] }}")
    assert Text(folder).render(MESSAGES) == "20"


def test_decode_leaves_special_tokens_out(tmp_path):
    text = Text(make_model(tmp_path))
    ids = text.encode("hello é")
    assert text.decode([*ids, 1]) == "hello é"
    assert text.decode([*ids, 319]) == "hello é"  # a padded row of the output layer has no text


def test_what_ends_an_answer(tmp_path):
    text = Text(make_model(tmp_path))
    assert text.eos_token_ids == (1,)
    write(tmp_path / "generation_config.json", {"eos_token_id": [7, 1, 5]})
    assert Text(str(tmp_path)).eos_token_ids == (1, 5, 7)
    assert text.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert text.bos_token_id == 0


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({}, 128),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}}, 400),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 128),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 128),
        ({"max_position_embeddings": None, "n_positions": 99}, 99),
    ],
)
def test_context(tmp_path, settings, context):
    text = Text(make_model(tmp_path, **settings))
    assert text.context == context
    assert text.vocab_size == 320


def test_wrong_files_are_named(tmp_path):
    folder = make_model(tmp_path, **{"max_position_embeddings": None})
    with pytest.raises(
        ConfigError, match=r"config\.json: says nothing of the context; it needs max_position_embeddings"
    ):
        _ = Text(folder).context
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer that `tokenizers` .* reads"):
        Text(folder)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file; write it with transformers"):
        Text(folder)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        Text(folder)
