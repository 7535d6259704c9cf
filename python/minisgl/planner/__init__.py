"""Will a model fit, how fast will it be, and with which flags: answered from config.json, before anything is loaded.

numbers    config.json of any family -> sizes, and what is not understood      machine   this GPU, RAM and link, or a named one
predict    bytes and bandwidths -> ms a token                                  plan      set-ups compared, in words
candidates every set-up, with its bytes and its speed                          report    tables, bars, JSON
features   what this version can run                                           auto      --auto, and what would fit instead
"""

from minisgl.planner.auto import apply_auto, explain_misfit, options_of
from minisgl.planner.command import add_plan_arguments, run_plan
from minisgl.planner.env import add_env_arguments, run_env

__all__ = [
    "add_env_arguments",
    "add_plan_arguments",
    "apply_auto",
    "explain_misfit",
    "options_of",
    "run_env",
    "run_plan",
]
