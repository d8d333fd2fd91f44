"""The laboratory: recipes and grids of trainings, their statistics and reports, searches; readers, metrics and Trainers for them.

It uses the library, hf_freeze. The library never imports it. Its packages are the extra `lab`.
"""
