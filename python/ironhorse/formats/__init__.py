"""The file formats ironhorse shares with other tools, read and written with numpy alone.

`llmc` model and debug-state .bin · `tokenizer` · `shards` token streams · `safetensors` · `staging` safe writing
"""
