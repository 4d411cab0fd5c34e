"""U_end from one render of a chat template. No vLLM in here; ``connector`` holds the plugin.

``ternary`` what a test's value is when only some names are known; ``guards`` which branches are
generation-only, and what is refused; ``template`` renders and marks at once; ``tokens`` characters
to tokens; ``encoders`` prompts that Python code builds instead of a template; ``lint`` a report.
"""
