"""Mixture-of-Experts execution: four axes that don't know of each other, joined in `layers/moe.py`.

base.py has the nouns and every routing rule, backend.py the contract of what multiplies; exchange/ says on
which rank a token meets its expert, store/ where weights live, formats/ how they are stored, kernels/ how
Triton reads them.
"""
