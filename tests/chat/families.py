"""Chat templates of the families that people use, written down small, and some that make finding turns hard."""

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

FAMILIES: dict[str, str] = {
    "chatml": CHATML,
    "chatml with a system prompt of its own": """\
{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"""
    + CHATML,
    "llama 2, system merged into the first user turn": """\
{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content.strip() + '\n<</SYS>>\n\n' %}\
{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}\
{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}\
{% endif %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + \
' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama 3": """\
{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + \
'<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\
{% endif %}""",
    "gemma, with the role model": """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}\
{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}\
{% for m in rest %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + \
(first if loop.first else '') + (m.content | trim) + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "mistral, system merged into the last user turn": """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}\
{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}\
{{ '[INST]' + ((system + '\n\n') if system is defined and loop.last else '') + m.content + '[/INST]' }}\
{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}""",
    "phi": """\
{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "thinking left out of earlier turns, and added to the last": """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}\
{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}{% if loop.last %}\
{% if '</think>' in m.content %}{{ '<think>\n' + m.content.split('</think>')[0].split('<think>')[-1].strip() + \
'\n</think>\n\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}{{ answer }}\
{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}""",
    "contents as lists of parts": """\
{% for m in messages %}{{ m.role | upper + ':' }}{% if m.content is string %}{{ ' ' + m.content }}{% else %}\
{% for part in m.content %}{% if part.type == 'image' %}{{ '<image>' }}{% else %}{{ ' ' + part.text }}{% endif %}\
{% endfor %}{% endif %}{{ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}""",
    "contents twice": """\
{% for m in messages %}{{ m.role + ' says ' + m.content + ', ' + m.content + '. ' }}{% endfor %}""",
    "contents without markers": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "contents as JSON": "{% for m in messages %}{{ m | tojson }}{{ '\n' }}{% endfor %}",
    "commands cut out": """\
{% for m in messages %}{{ '[' + m.role + ']' + m.content.replace('/no_think', '').rstrip() + '[end]' }}{% endfor %}""",
}
