# ruff: noqa: E501 templates are long
"""Tokenizers with chat templates in the styles of GPT-2 (one of our own), Llama 2, Llama 3 and Qwen 2.5.

The templates are ours; what they render are the formats that these models were trained on. Each of them lies
where another of transformers' ways to keep a template has it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

TOKENIZERS = Path(__file__).parent / "tokenizers"

GPT2 = """\
{#- Turns as paragraphs, each under its role. -#}
{%- for message in messages %}
    {{- '## ' ~ message['role'] | title ~ '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
        {{- message['content'] | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '## Assistant\\n' }}
{%- endif %}
"""
LLAMA2 = """\
{% set ns = namespace(system='') %}
{% for message in messages %}
{% if message.role == 'system' %}
    {%- if not loop.first %}{{ raise_exception('the system message comes first') }}{% endif %}
    {%- set ns.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' %}
{% elif message.role == 'user' %}
    {%- if not loop.last and messages[loop.index0 + 1].role == 'user' %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {{- bos_token + '[INST] ' + ns.system + message.content.strip() + ' [/INST]' }}
    {%- set ns.system = '' %}
{% elif message.role == 'assistant' %}
    {%- generation %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endgeneration %}
{% else %}
    {{- raise_exception('there are only system, user and assistant, not ' ~ message.role) }}
{% endif %}
{% endfor %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- set date = date_string | default(strftime_now('%d %b %Y')) %}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- macro header(role) -%}
<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{{- header('system') }}Today is {{ date }}.{{ '\\n\\n' }}
{%- if tools %}
You may call:
    {%- for tool in tools %}
{{ tool | tojson(indent=2) }}
    {%- endfor %}
{{ '\\n' }}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.tool_calls is defined %}
        {{- header('assistant') + message.tool_calls[0].function | tojson + '<|eot_id|>' }}
    {%- elif message.role == 'assistant' %}
        {{- header(message.role) }}
        {%- generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- header(message.role) + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
"""
QWEN = """\
{%- if messages[0].role != 'system' %}
<|im_start|>system
You are a careful helper.<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else message.content | map(attribute='text') | join('') %}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {%- set text = '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' ~ text %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ text + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- text + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
QWEN3 = """\
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}{% set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content | default('') %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content | default('') %}
        {%- if not thought and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.question and (loop.last or thought) %}
            {%- set text = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n' if text or not loop.first else '') + '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
R1 = """\
{{- bos_token }}
{%- for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' }}
        {%- generation %}{{ message.content.split('</think>')[-1] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}
"""
PHI = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|end|>\\n' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}
"""
REWRITING = {"qwen3": QWEN3, "r1": R1, "phi": PHI}
"""Templates in the styles of Qwen3, DeepSeek-R1 and Phi-3, which write an earlier turn otherwise than the last."""
TOOL_USE = "{% for tool in tools %}{{ tool['name'] }};{% endfor %}{{ messages | length }}{{ bos_token }}"
RAG = "{{ documents | map(attribute='title') | join(', ') }}: {{ messages[-1]['content'] | upper }}"

STYLES = {"gpt2": "gpt2", "llama2": "llama2", "llama3": "llama3", "qwen": "chat"}
"""Style -> the tokenizer of ``tokenizers/`` that it stands on."""


def write_style(style: str, target: Path) -> Path:
    """A tokenizer's directory with the template of a style; ``target`` is made."""
    shutil.copytree(TOKENIZERS / STYLES[style], target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    if style == "gpt2":  # a file of its own
        (target / "chat_template.jinja").write_text(GPT2, encoding="utf-8")
        config["chat_template"] = "the file goes first"
    elif style == "llama2":  # a text in the configuration
        config["chat_template"] = LLAMA2
    elif style == "llama3":  # a file, and further ones by name
        (target / "chat_template.jinja").write_text(LLAMA3, encoding="utf-8")
        (target / "additional_chat_templates").mkdir()
        (target / "additional_chat_templates/rag.jinja").write_text(RAG, encoding="utf-8")
    else:  # several in the configuration
        config |= {
            "eos_token": "<|im_end|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "chat_template": [
                {"name": "default", "template": QWEN},
                {"name": "tool_use", "template": TOOL_USE},
            ],
        }
        (target / "special_tokens_map.json").unlink()
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return target
