# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The kernel inside vLLM: throughput, exact match, agreement and profiles, run in child processes and recorded.

    python -m mla_kernels.serving throughput --backends CUTLASS_MLA --record data/measurements/h200/serving.json
    python -m mla_kernels.serving eval --cells CUTLASS_MLA:fp8,FLASHMLA:auto --record data/measurements/h200/eval.json
    python -m mla_kernels.serving profile --record data/measurements/h200/profile.json

The interpreter that has vLLM is this one or that of `--python`. Nothing here imports vLLM: what its processes write
(their log, `--output-json`, lm-eval's results) is read and checked, and the backend and the size of the cache are what
its log states. A run that fails or hangs has a row that says why, and its log stays.

DeepSeek-V2 with tensor parallel 4 and expert parallel, as published, on four GPUs; and its dry run on two with a cut:

    python -m mla_kernels.serving throughput --config deepseek-v2 --tp 4 --expert-parallel --record FILE
    python -m mla_kernels.serving throughput --config deepseek-v2 --tp 2 --expert-parallel --layers 8 --prompts 50 \\
        --record FILE
"""
