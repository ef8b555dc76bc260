"""Chat templates like those that targets have."""

# as Qwen3's: thoughts are the model's own, an earlier answer is left without them, an answer has an
# empty pair where it has none; enable_thinking=False closes them in the prompt
THINKS = """{%- for m in messages %}
    {%- set thoughts, said = ('', m.content) if '</think>' not in m.content else \
(m.content.split('</think>')[0].split('<think>')[-1].strip(), \
m.content.split('</think>')[-1].lstrip()) %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.last %}{{- '<think>\n' + thoughts + '\n</think>\n\n' \
}}{%- endif %}
    {{- (said if m.role == 'assistant' else m.content) + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false \
%}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
# as Kimi-K2.5's: the prompt opens the thoughts, every answer has an empty pair
OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + ('<think></think>' if "
    "m.role == 'assistant' else '') + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think></think>' if "
    "thinking is defined and thinking is false else '<think>') }}{% endif %}"
)
# as DeepSeek-R1's: the same prompt, no answer keeps its thoughts
STRIPS = OPENS.replace(
    "('<think></think>' if m.role == 'assistant' else '') + m.content",
    "m.content.split('</think>')[-1]",
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
