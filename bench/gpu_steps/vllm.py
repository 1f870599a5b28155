"""vLLM in a slot, in this process: its tokens are our engine's, and a second model finds the memory of the first."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.device import engine
from bench.device.packs import Pack, pack_of_checkpoint
from bench.gpu_steps.machine import used_mb
from bench.gpu_steps.step import Setup, at_most, figure, on_gpu
from bench.report import Check
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_checkpoints import quantized_checkpoint
from torchrelay.common.tokens.grammar import CompiledGrammar
from torchrelay.engine.core import SamplingParams
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.engine import EngineHooks
