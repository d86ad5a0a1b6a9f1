"""A job that dies in the middle and is started again; a checkpoint of two workers in other jobs."""

import json
import os
import re

import numpy as np
import pytest

from tests.multi_worker.harness import start_workers
