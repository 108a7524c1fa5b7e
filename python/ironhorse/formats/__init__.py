"""The file formats ironhorse shares with other tools, read and written with numpy alone.

`llmc` model and debug-state .bin · `tokenizer` · `shards` token streams · `safetensors` · `hf` folders · `checkpoint`
folders · `folders` of any kind, runs too · `bf16` as bits · `staging` safe writing
"""
