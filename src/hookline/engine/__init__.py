"""The engine: hook points on any `nn.Module`. This file is its contract: nothing else of it is used outside.

Points and lenses
  `Site` is an event of a module (`Kind`) and a `Lens`, which finds a tensor in the value that passes there: `FIRST`,
  or what `lens_of` makes; `chained` puts lenses together, and `parts_of` takes them apart. A `Formula` is a lens that
  computes its tensor, as data that every way of running interprets; a `Derived` one remembers edits; `saved_at` has
  what passed at a site that it needs. `HookPoint` is a site with a name, and `Points` are those of a model.
Actions and runs
  An `Action` does something with a value at an event, in the order that `Turn` states; a `PointAction` at a point; a
  `HookAction` calls a hook: an `Edit` changes the activation. `Record` keeps it in a `Recorder`; `StopForward` ends a
  pass. A `Run` has actions for the length of a block, `PermanentHooks` those that stay; `HookHandle` is one of them,
  `Registration` how it is held; `open_runs` are those of this thread. `HookObject` is a hook that makes its own action.
Models
  `Hooked` is a model with points and the verbs that run it; `Delegate` a wrapper that is like the module inside;
  `ActivationCache` what a run recorded; `Plan` what a run would touch, and `pass_without_data` the memory that it would
  take. In a `Skipping` block, modules are not run.
State
  `pass_state` is what changes while a model runs in this thread, and `snapshot` the value of a tensor now, whatever is
  written to it later. `TextSupport` answers what the engine asks about texts.
Rooms of their own, each with a page of its own
  `compiling`, `undo`, `sharding`, `attention`. `tricks` tries all that is private of torch and Python.
"""

from hookline.engine import attention, compiling, sharding, undo
from hookline.engine._memory.live_bytes import pass_without_data
from hookline.engine._memory.snapshots import snapshot
from hookline.engine._recording.recorder import Recorder, StopForward
from hookline.engine._recording.skipping import Skipping
from hookline.engine._staying.permanent import PermanentHooks
from hookline.engine._staying.registration import Registration
from hookline.engine._torch import tricks
from hookline.engine.actions import Action, PointAction, Record
from hookline.engine.cache import ActivationCache
from hookline.engine.callbacks import HookObject
from hookline.engine.delegate import Delegate
from hookline.engine.derived import Derived
from hookline.engine.formulas import Formula, saved_at
from hookline.engine.hook_actions import Edit, HookAction
from hookline.engine.hooked import Hooked
from hookline.engine.lenses import FIRST, Lens, chained, parts_of
from hookline.engine.names import Points, lens_of
from hookline.engine.order import Kind, Turn
from hookline.engine.pass_state import pass_state
from hookline.engine.passes import TextSupport
from hookline.engine.plan import Plan
from hookline.engine.points import HookHandle, HookPoint, Site
from hookline.engine.runs import Run, open_runs

__all__ = (
    "FIRST",
    "Action",
    "ActivationCache",
    "Delegate",
    "Derived",
    "Edit",
    "Formula",
    "HookAction",
    "HookHandle",
    "HookObject",
    "HookPoint",
    "Hooked",
    "Kind",
    "Lens",
    "PermanentHooks",
    "Plan",
    "PointAction",
    "Points",
    "Record",
    "Recorder",
    "Registration",
    "Run",
    "Site",
    "Skipping",
    "StopForward",
    "TextSupport",
    "Turn",
    "attention",
    "chained",
    "compiling",
    "lens_of",
    "open_runs",
    "parts_of",
    "pass_without_data",
    "pass_state",
    "saved_at",
    "sharding",
    "snapshot",
    "tricks",
    "undo",
)
