from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backend.models import chat_template, template_sandbox
from backend.models.chat_template import ChatTemplate, TemplateError
from backend.models.gguf import GGUFFile

DATA = Path(__file__).with_name("data")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"city": "Oslo", "days": 2}'
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}


def render(
    text: str, messages: list[dict[str, Any]] | None = None, tools: Any = None, **options: Any
) -> str:
    template = ChatTemplate(text, bos_token="<s>", eos_token="</s>")
    return template.render(USER if messages is None else messages, tools, **options)


def refused(text: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        render(text, messages, **options)
    return str(caught.value)


def test_the_template_of_a_real_gguf_renders(tmp_path: Path) -> None:
    path = tmp_path / "phi-3.gguf"
    path.write_bytes(gzip.decompress((DATA / "ggml-vocab-phi-3.gguf.gz").read_bytes()))
    text = GGUFFile(path).metadata["tokenizer.chat_template"]
    messages = [
        *USER,
        {"role": "assistant", "content": "  yes "},
        {"role": "user", "content": "ok"},
    ]
    wanted = (
        "<s><|user|>\nhi<|end|>\n<|assistant|>\n  yes <|end|>\n<|user|>\nok<|end|>\n<|assistant|>\n"
    )
    assert render(text, messages) == wanted


def test_the_generation_prompt_is_optional() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_message_text_is_never_a_template() -> None:
    nasty = "{{ messages }} {% if x %} {# gone? #} <b>&amp;</b>"
    assert nasty in render(CHATML, [{"role": "user", "content": nasty}])


def test_blocks_take_their_line_with_them() -> None:
    text = "a\n  {% if true %}\nb\n  {% endif %}\nc"
    assert render(text) == "a\nb\nc"


def test_loop_controls_work() -> None:
    text = "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
    assert render(text + "{% endfor %}") == "013"


def test_json_is_neither_escaped_for_html_nor_for_ascii() -> None:
    text = "{{ tools | tojson }}|{{ tools[0] | tojson(indent=1) }}|{{ tools | tojson(separators=(',', ':')) }}"
    wanted = '[{"b": "<é> & \'"}]|{\n "b": "<é> & \'"\n}|[{"b":"<é> & \'"}]'
    assert render(text, tools=[{"b": "<é> & '"}]) == wanted


def test_json_keeps_the_order_of_keys() -> None:
    assert render("{{ tools | tojson }}", tools=[{"z": 1, "a": 2}]) == '[{"z": 1, "a": 2}]'


def test_tools_are_none_when_there_are_none() -> None:
    text = "{{ 'none' if tools is none else tools | length }}"
    assert [render(text, tools=tools) for tools in (None, [], [{}])] == ["none", "none", "1"]


def test_a_template_that_walks_no_tools_gets_an_empty_list() -> None:
    assert render("{% for tool in tools %}x{% endfor %}done") == "done"


def test_special_tokens_and_other_variables_are_there() -> None:
    assert (
        render("{{ bos_token }}{{ eos_token }}{{ enable_thinking }}", enable_thinking=False)
        == "<s></s>False"
    )


def test_a_request_cannot_replace_the_models_own_tokens() -> None:
    assert render("{{ bos_token }}", bos_token="evil") == "<s>"


def test_the_clock_of_strftime_now_is_injected() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}",
        bos_token="",
        eos_token="",
        now=lambda: datetime(2024, 7, 26, tzinfo=UTC),
    )
    assert template.render(USER, None) == "26 Jul 2024"


def test_the_generation_tag_is_its_body() -> None:
    assert render("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c") == "ab2c"


def test_namespaces_carry_values_out_of_loops() -> None:
    text = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    assert render(text, USER * 3) == "3"


def test_tool_arguments_reach_the_template_as_an_object() -> None:
    text = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.city }} {{ c.function.arguments | tojson }}"
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert render(text + "{% endfor %}", [message]) == f"Oslo {ARGUMENTS}"


def test_a_template_that_concatenates_arguments_gets_them_as_text() -> None:
    text = "{{ 'args: ' + messages[0].tool_calls[0].function.arguments }}"
    assert render(text, [{"role": "assistant", "tool_calls": [CALL]}]) == f"args: {ARGUMENTS}"


def test_arguments_that_are_no_json_stay_text() -> None:
    call = {"function": {"name": "f", "arguments": "{broken"}}
    text = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(text, [{"role": "assistant", "tool_calls": [call]}]) == "{broken"


def test_the_callers_messages_are_left_as_they_were() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    before = json.dumps(messages)
    render(CHATML, messages)
    render(CHATML, [*messages, {"role": "assistant", "content": "x"}], continue_final_message=True)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": None}, {"role": "user"}], ids=["null", "absent"]
)
def test_no_content_is_empty_text(message: dict[str, Any]) -> None:
    assert render("[{{ messages[0].content.strip() }}]", [message]) == "[]"


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_text_parts_are_joined() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": PARTS}]) == "one\ntwo"


def test_a_template_that_only_knows_parts_gets_parts() -> None:
    text = "{% for part in messages[0]['content'] %}<{{ part.type }}:{{ part.text }}>{% endfor %}"
    assert render(text) == "<text:hi>"


def test_a_template_that_knows_both_gets_text() -> None:
    text = "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
    text += "{% for part in messages[0].content %}{{ part }}{% endfor %}{% endif %}"
    assert render(text, [{"role": "user", "content": PARTS}]) == "one\ntwo"


def test_parts_of_another_kind_are_left_for_the_template() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    text = "{% for part in messages[0].content %}{{ part.type }} {% endfor %}"
    assert render(text, [{"role": "user", "content": [*PARTS, image]}]) == "text text image_url "


PREFILL = [*USER, {"role": "assistant", "content": " The capital is "}]


def test_a_continued_message_ends_right_after_its_text() -> None:
    out = render(CHATML, PREFILL, continue_final_message=True)
    assert out == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n The capital is "


def test_a_continued_message_ends_trimmed_where_the_template_trims() -> None:
    out = render(
        CHATML.replace("message.content", "message.content | trim"),
        PREFILL,
        continue_final_message=True,
    )
    assert out.endswith("<|im_start|>assistant\nThe capital is")


def test_a_continued_message_is_rendered_without_a_generation_prompt() -> None:
    out = render("{{ add_generation_prompt }} " + CHATML, PREFILL, continue_final_message=True)
    assert out.startswith("False ")


def test_a_user_who_writes_the_end_mark_does_not_cut_the_prompt() -> None:
    messages = [
        {"role": "user", "content": chat_template._END},
        {"role": "assistant", "content": "yes"},
    ]
    assert render(CHATML, messages, continue_final_message=True).endswith("assistant\nyes")


def test_an_empty_message_can_be_continued() -> None:
    out = render(CHATML, [*USER, {"role": "assistant", "content": ""}], continue_final_message=True)
    assert out.endswith("<|im_start|>assistant\n")


def test_the_text_continued_may_occur_earlier_too() -> None:
    messages = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]
    out = render(CHATML, messages, continue_final_message=True)
    assert out.count("yes") == 2


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user", "content": [{"type": "image_url"}]}]], ids=["none", "image"]
)
def test_only_text_can_be_continued(messages: list[dict[str, Any]]) -> None:
    assert "final message" in refused(CHATML, messages, continue_final_message=True)


def test_a_template_that_drops_the_message_cannot_continue_it() -> None:
    assert "cannot be continued" in refused("nothing", continue_final_message=True)


def test_the_templates_own_complaint_is_passed_on_word_for_word() -> None:
    assert (
        refused("{{ raise_exception('System role not supported') }}") == "System role not supported"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ messages[0].content.startswith(3) }}", "startswith"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% include 'other' %}", "loader"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ '%s' | format }}", "format"),
    ],
)
def test_a_failing_template_says_why_in_one_error(text: str, says: str) -> None:
    assert says in refused(text)


@pytest.mark.parametrize(
    "text", ["{% if %}", "{% for x in y %}", "{{ 'open", "{% nonsense %}", "{{" * 3000]
)
def test_broken_jinja_is_refused_at_once(text: str) -> None:
    with pytest.raises(TemplateError, match="chat template: "):
        ChatTemplate(text, bos_token="", eos_token="")


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_would_run_for_ever_is_stopped(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_TURNS", 10_000)
    assert "loop turns" in refused(text)


def test_a_macro_that_calls_itself_is_stopped() -> None:
    assert "calls itself" in refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' * 9999999999 }}",
        "{{ 9999999999 * 'x' }}",
        "{{ [1] * 9999999999 }}",
        "{{ ('x' * 10000) * 100000 }}",
        "{{ 99999999 * 99999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(9999999) %}{% endfor %}",
    ],
)
def test_a_template_cannot_ask_for_a_huge_value(text: str) -> None:
    refused(text)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARS", 1000)
    assert "more than 1000 characters" in refused("{% for i in range(2000) %}x{% endfor %}")


def test_arithmetic_still_works() -> None:
    assert render("{{ 3 * 4 }} {{ 'ab' * 2 }} {{ 1.5 * 2 }}") == "12 abab 3.0"


def test_loop_variables_still_work_when_turns_are_counted() -> None:
    text = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% else %}none{% endfor %}"
    assert render(text, USER * 2) == "1/2False 2/2True "
    assert render(text, []) == "none"
