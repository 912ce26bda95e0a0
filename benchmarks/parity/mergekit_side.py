"""Runs in mergekit's own environment: merges what it is asked to, one JSON line for each request, until stdin ends.

A request may bring masks: then the random draws of dare and della are replaced by them, tensor by tensor and expert by
expert, so that both sides drop the same elements and the rest of the arithmetic can be compared exactly.
"""

import contextlib
import json
import logging
import shutil
import sys
import time
import warnings

import mergekit.merge_methods.generalized_task_arithmetic as gta
import mergekit.merge_methods.task_adapter as adapter
import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file

STATE = {"tensor": None, "expert": 0, "masks": None, "probabilities": {}}


def _key():
    return f"{STATE['tensor']}|{STATE['expert'] - 1}"


def _installed(execute, sparsify, bernoulli):
    """Return wrappers that know which tensor and which expert is drawn for."""

    def executing(self, *args, **kwargs):
        STATE.update(tensor=self.output_weight.name, expert=0)
        return execute(self, *args, **kwargs)

    def sparsifying(*args, **kwargs):
        STATE["expert"] += 1
        return sparsify(*args, **kwargs)

    def drawing(probabilities, *args, **kwargs):
        if STATE["masks"] is None:
            return bernoulli(probabilities, *args, **kwargs)
        STATE["probabilities"][_key()] = probabilities.clone().contiguous()
        return STATE["masks"][_key()].reshape(probabilities.shape).to(probabilities.dtype)

    return executing, sparsifying, drawing


def _merge(request):
    STATE.update(masks=load_file(request["masks"]) if request.get("masks") else None, probabilities={})
    if "seed" in request:
        torch.manual_seed(request["seed"])
    shutil.rmtree(request["out"], ignore_errors=True)
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(request["config"]), request["out"], options)
    if request.get("probabilities"):
        save_file(STATE["probabilities"], request["probabilities"])


def main():
    """Answer requests."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    task = adapter.ExecuteMergeMethodTask
    task.execute, gta.sparsify, torch.bernoulli = _installed(task.execute, gta.sparsify, torch.bernoulli)
    answers = sys.stdout
    for line in sys.stdin:
        began = time.perf_counter()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                _merge(json.loads(line))
            answer = {"ok": True, "seconds": time.perf_counter() - began}
        except Exception as error:  # noqa: BLE001 - whatever mergekit raises is the answer
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
