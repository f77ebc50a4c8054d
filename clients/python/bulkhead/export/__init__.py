"""Turns models into packages that bulkhead's `generate` runtime loads; see
`python -m bulkhead.export --help`.

Needs torch and transformers, which the rest of bulkhead does not; importing this alone imports
neither. A package is a folder: manifest.json, decode and prefill compiled by AOTInductor, one
weights.safetensors that they share, and the tokenizer's files; docs/generation.md describes it.
"""
