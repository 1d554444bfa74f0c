"""Text and token ids of one model, by its tokenizer's files alone (no transformers).

What always holds: `render` gives the text that transformers' `apply_chat_template(add_generation_prompt=True)` gives,
and `encode` the ids of its tokenizer, but for two things: a prompt begins with one BOS, never two, and never ends in
an EOS that the tokenizer would add (the model would see its answer as over). Sampled tokens are never encoded again.
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import tokenizers

from areal_async.errors import ConfigError, DataError
from areal_async.rollout.data import PromptValue
from areal_async.rollout.values import Json

if TYPE_CHECKING:
    import jinja2

ChatTemplate = Literal["auto", "plain"]

# What a configuration calls the length of its position embeddings, newest name first.
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
UNKNOWN_LENGTH: Final = 1 << 40  # longer than any context: only tokenizing tells
_NFC_GROWTH: Final = 3  # bytes of UTF-8 that one becomes at most, where a text is brought into normal form C
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Text:
    """Prompts to token ids, token ids to text. Thread-safe; encoding takes some 50 µs for a short prompt."""

    def __init__(self, model_path: str, chat_template: ChatTemplate = "auto") -> None:
        """model_path: folder with config.json and tokenizer.json. chat_template: "auto": strings are one user message
        (where the tokenizer has a template); "plain": strings are prompts as they stand. Messages always go through
        the template. Errors: ConfigError that names the file."""
        folder = Path(model_path)
        self._chat_template = chat_template
        self._model_file = str(folder / "config.json")
        self._model = _read_json(folder / "config.json")
        self._tokenizer = _tokenizer(folder / "tokenizer.json")
        settings = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        self._file, source = _template_source(folder, settings)
        self._template = None if source is None else _compile(source, self._file)
        self.special_tokens: Final = _special_tokens(folder, settings)
        """Named special tokens: `bos_token`, `eos_token`, … -> text."""
        self.bos_token_id: Final = self._id("bos_token")
        self.eos_token_ids: Final = self._end_tokens(folder)
        """Tokens that end an answer: the tokenizer's EOS and those of generation_config.json, ascending."""
        self._prefix = self._added_in_front()
        self._frames: dict[tuple[str, ...], int] = {}

    @property
    def vocab_size(self) -> int:
        """Entries of the model's output layer (may be more than the tokenizer has tokens)."""
        size = _inner(self._model).get("vocab_size")
        return size if isinstance(size, int) else self._tokenizer.get_vocab_size()

    @property
    def context(self) -> int:
        """Prompt and answer together, tokens: config.json's positions, times the factor of a stretched RoPE.

        Errors: ConfigError where config.json doesn't say.
        """
        return _context(_inner(self._model), self._model_file)

    def render(self, prompt: PromptValue) -> str:
        """The prompt's text as the model sees it (a BOS that the tokenizer adds isn't in it).

        Errors: DataError: the template refused the prompt, or there is none for messages.
        """
        if isinstance(prompt, str):
            if self._as_it_stands(prompt):
                return prompt
            prompt = ({"role": "user", "content": prompt},)
        if self._template is None:
            raise DataError("the prompt is a list of messages, but the model's tokenizer has no chat template")
        import jinja2

        try:
            return self._template.render(
                messages=list(prompt), tools=None, documents=None, add_generation_prompt=True, **self.special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise DataError(f"the chat template ({self._file}) refuses the prompt: {error}") from error

    def encode(self, prompt: PromptValue) -> list[int]:
        """Token ids of the prompt. Errors: as `render`; DataError for a prompt without any token."""
        return self._finish(prompt, self._tokenizer.encode(self.render(prompt), add_special_tokens=False).ids)

    def encode_all(self, prompts: Sequence[PromptValue]) -> list[list[int]]:
        """Token ids of each prompt, encoded together on all cores. Errors: as `encode`."""
        encodings = self._tokenizer.encode_batch_fast([self.render(p) for p in prompts], add_special_tokens=False)
        return [self._finish(p, encoding.ids) for p, encoding in zip(prompts, encodings, strict=True)]

    def most_tokens(self, prompt: PromptValue) -> int:
        """A number that the prompt's tokens can't exceed, without tokenizing it (some 1 µs).

        A token is at least one byte of the text, which is the contents and what the template writes around them. (NFC,
        which some tokenizers apply first, makes up to three bytes of one; those that write single characters out at
        greater length are none of causal models.) Templates that write contents twice would break it.
        """
        if isinstance(prompt, str):
            if self._as_it_stands(prompt):
                return _most_bytes(prompt) + len(self._prefix)
            return _most_bytes(prompt) + self._frame(("user",))
        contents = [message["content"] for message in prompt]
        if any(message.keys() != {"role", "content"} for message in prompt):
            return UNKNOWN_LENGTH
        bytes_ = sum(_most_bytes(content) if isinstance(content, str) else UNKNOWN_LENGTH for content in contents)
        return bytes_ + self._frame(tuple(str(message["role"]) for message in prompt))

    def cut(self, token_ids: list[int], limit: int) -> list[int]:
        """The last `limit` tokens; where a BOS leads, it stays and is one of them."""
        if len(token_ids) <= limit:
            return token_ids
        if token_ids[0] == self.bos_token_id:
            return [token_ids[0], *token_ids[len(token_ids) - limit + 1 :]]
        return token_ids[-limit:]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _frame(self, roles: tuple[str, ...]) -> int:
        """Bytes that the template writes for messages of these roles without any content."""
        if roles not in self._frames:
            try:
                rendered = self.render(tuple({"role": role, "content": ""} for role in roles))
                self._frames[roles] = _most_bytes(rendered)
            except DataError:  # it may want contents; whether the prompt itself is refused is found when it is rendered
                self._frames[roles] = UNKNOWN_LENGTH
        return self._frames[roles]

    def _as_it_stands(self, prompt: str) -> bool:
        """Also a string that begins with BOS: somebody has rendered it already."""
        bos = self.special_tokens.get("bos_token")
        return self._chat_template == "plain" or self._template is None or (bos is not None and prompt.startswith(bos))

    def _finish(self, prompt: PromptValue, ids: list[int]) -> list[int]:
        """One BOS: a template writes its own or wants none; a prompt as it stands gets what the tokenizer adds."""
        plain = isinstance(prompt, str) and self._as_it_stands(prompt)
        if plain and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        doubled = 0
        while self.bos_token_id is not None and ids[doubled : doubled + 2] == [self.bos_token_id] * 2:
            doubled += 1
        ids = ids[doubled:]
        if not ids:
            raise DataError("the prompt has no tokens")
        return ids

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _end_tokens(self, folder: Path) -> tuple[int, ...]:
        generation = folder / "generation_config.json"
        named = [self._id("eos_token")]
        for settings in (_inner(self._model), _read_json(generation) if generation.exists() else {}):
            value = settings.get("eos_token_id")
            named += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
        return tuple(sorted({token for token in named if token is not None}))

    def _added_in_front(self) -> list[int]:
        """Ids that the tokenizer's post-processor puts before a text (those it puts behind are EOS or the like)."""
        for text in ("a", "0", " ", "\n"):
            encoding = self._tokenizer.encode(text, add_special_tokens=True)
            if 0 in encoding.special_tokens_mask:
                return encoding.ids[: encoding.special_tokens_mask.index(0)]
        ids = self._tokenizer.encode("", add_special_tokens=True).ids
        return ids[:1] if ids[:1] == [self.bos_token_id] else []


def _most_bytes(text: str) -> int:
    return len(text) if text.isascii() else _NFC_GROWTH * len(text.encode("utf-8", "surrogatepass"))


# ------------------------------------------------------------------------------------------------ the model's files


def _read_json(path: Path) -> dict[str, Json]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def _tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file; write it with transformers: "
            f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained({str(path.parent)!r})"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"{path}: not a tokenizer that `tokenizers` {tokenizers.__version__} reads: {error}"
        ) from error
    tokenizer.no_truncation()  # files written by a trainer may say "cut at 512" or "fill up to 512"
    tokenizer.no_padding()
    return tokenizer


def model_settings(folder: str) -> dict[str, Json]:
    """The part of a model's config.json that is about text. Errors: ConfigError that names the file."""
    return _inner(_read_json(Path(folder) / "config.json"))


def _inner(model: dict[str, Json]) -> dict[str, Json]:
    """The part of config.json that is about text."""
    text = model.get("text_config")
    return model | text if isinstance(text, dict) else model


def _context(settings: dict[str, Json], file: str) -> int:
    found = [value for key in _CONTEXT_KEYS if isinstance(value := settings.get(key), int)]
    if not found:
        raise ConfigError(f"{file}: says nothing of the context; it needs {_CONTEXT_KEYS[0]}")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    factor = rope.get("factor") if isinstance(rope, dict) else None
    if not isinstance(rope, dict) or isinstance(factor, bool) or not isinstance(factor, int | float):
        return found[0]
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn":
        return int((original if isinstance(original, int) else found[0]) * factor)
    return int(found[0] * factor) if kind in ("linear", "dynamic") else found[0]


def _special_tokens(folder: Path, settings: dict[str, Json]) -> dict[str, str]:
    """Names that end in `_token`, as templates use them; tokenizer_config.json before special_tokens_map.json."""
    older = folder / "special_tokens_map.json"
    tokens: dict[str, str] = {}
    for values in (_read_json(older) if older.exists() else {}, settings):
        for name in _SPECIAL:
            value = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _template_source(folder: Path, settings: dict[str, Json]) -> tuple[str, str | None]:
    """File and source of the default chat template; chat_template.jinja comes before tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return str(file), file.read_text(encoding="utf-8")
    value, name = settings.get("chat_template"), str(folder / "tokenizer_config.json")
    if isinstance(value, list):  # several templates by name
        named = {str(t.get("name")): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
        if value is None:
            raise ConfigError(f"{name}: has the chat templates {', '.join(named)}, but none that is named default")
    return name, value if isinstance(value, str) else None


# ------------------------------------------------------------------------------------------------------ the template


def _compile(source: str, file: str) -> "jinja2.Template":
    """As transformers compiles it: sandboxed, blocks trimmed, `tojson` without HTML escapes.

    `{% generation %}` (which marks the assistant's part in training templates) is passed over.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's own class attribute)

        def parse(self, parser: "jinja2.parser.Parser") -> "list[jinja2.nodes.Node]":
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raiser(jinja2.TemplateError)
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{file}: the chat template can't be compiled (its line {line}): {error}") from error


def _raiser(kind: type[Exception]) -> Callable[[str], str]:
    def raise_exception(message: str) -> str:
        raise kind(message)

    return raise_exception


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Options and defaults of transformers' `tojson`, since templates use them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
