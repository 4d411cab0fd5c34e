"""The P/D proxy: one OpenAI-compatible address in front of prefill and decode workers.

Layers, top down: ``app`` (HTTP), ``exchange`` (one request: both legs, retries, deadlines),
``upstream`` (one call to one worker), ``pool`` (workers, health, load). Decisions are plain
functions on plain data: ``legs`` (what each leg is asked), ``answers`` (what the client is told),
``routing`` (which worker), ``sse`` (framing).
"""
