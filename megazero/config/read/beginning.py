"""Where a run begins: what the folders of --load and --save say of it.

``parse`` reads no checkpoint. ``read_beginning`` does, on one rank, and ``begun`` (read/parse.py) completes the
configuration by what it says on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megazero.checkpoint.directory import Look, described, latest, named, stated
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    manifest_text,
    parse_manifest,
    read_manifest,
    to_json,
)
from megazero.config.model.published import is_published
from megazero.config.options.fields import Resume
from megazero.config.run import all_options, known_values, with_defaults


class Chosen(NamedTuple):
    """The checkpoint that --load means, or None.

    named: its folder or --ckpt-step names it. again: this command has begun before and saved it since.
    """

    path: Path | None
    named: bool = False
    again: bool = False


def checkpoint_to_load(values: Mapping[str, Any], look: Look = described) -> Chosen:
    """Return the checkpoint that a run with these options by name begins from.

    A restart continues from its own newest checkpoint, wherever the command began: a requeued job does not go back to
    --ckpt-step or to another folder a second time. Otherwise the folder of --load or --ckpt-step names the
    checkpoint; else it is the newest that ``look`` accepts. Raises CheckpointError if there is none of that step.
    """
    load, save, step = values.get("load"), values.get("save"), values.get("ckpt_step")
    if load is None:
        return Chosen(None)
    own = latest(save, look=look) if save else None
    by_name = not is_published(load) and (step is not None or named(load) is not None)
    if own is not None and _begins_alike(values, _manifest(own), by_name):
        return Chosen(own, again=True)
    if is_published(load):
        return Chosen(None)
    one = named(load, step)
    return Chosen(one, named=True) if one is not None else Chosen(latest(load, look=look))


@dataclass(frozen=True)
class Beginning:
    """What the folders of --load and --save say of where a run begins, as one rank has read them.

    path, manifest: the checkpoint that --load means, or None. again: this command has begun before and saved it
    since. consumed: its samples, which only a ramp-up asks for. error: why --load means none.
    """

    path: Path | None = None
    manifest: Manifest | None = None
    again: bool = False
    consumed: int = 0
    error: str = ""

    @property
    def told(self) -> bytes:
        """The JSON by which other ranks are told; ``of`` reads it."""
        text = manifest_text(self.manifest).decode() if self.manifest else None
        return json.dumps(
            [self.path and f"{self.path}", text, self.again, self.consumed, self.error]
        ).encode()

    @classmethod
    def of(cls, told: bytes) -> Beginning:
        path, text, *others = json.loads(told)
        if path is None:
            return cls(None, None, *others)
        return cls(Path(path), parse_manifest(text.encode(), Path(path) / MANIFEST_FILE), *others)

    def goes_on(self, values: Mapping[str, Any]) -> bool:
        """Tell whether the checkpoint's run goes on; else a new one begins (--finetune)."""
        return self.path is not None and (self.again or not values.get("finetune"))


def read_beginning(values: Mapping[str, Any]) -> Beginning:
    """Read where a run with these options by name begins. Raises OSError if the storage does not answer."""
    try:
        chosen = checkpoint_to_load(values)
        if chosen.path is None:
            return Beginning()
        resized = values.get("rampup_batch_size") or values.get("step_batch_size_schedule")
        consumed = stated(chosen.path).get("consumed_samples", 0) if resized else 0
        return Beginning(chosen.path, _manifest(chosen.path), chosen.again, consumed)
    except ValueError as error:
        return Beginning(error=f"{error}")


def _manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises ValueError, too, if its configuration is none that a run can have."""
    manifest = read_manifest(path)
    if errors := known_values(manifest.configuration)[1]:
        raise CheckpointError(
            f"the configuration in '{path / MANIFEST_FILE}' is none that a run can have: {'; '.join(errors)}; load "
            "another checkpoint"
        )
    return manifest


def _begins_alike(values: Mapping[str, Any], saved: Manifest, by_name: bool) -> bool:
    """Tell whether this command saved the checkpoint: the run began at the same place in the same way, whatever its
    ranks and layout.

    by_name: the command names a checkpoint. Given again with another optimizer, or with other iterations left out, it
    goes back to that one; a command that takes the newest continues.
    """
    decides = Resume.BEGINS | Resume.BY_NAME if by_name else Resume.BEGINS
    decide = [o for o in all_options().values() if o.resume & decides]
    now = with_defaults(values, [o.name for o in decide])
    now["finetune"] = now["finetune"] or is_published(values.get("load"))
    stored = {o.name: saved.configuration.get(o.section, {}).get(o.name, o.default) for o in decide}
    return to_json(now, "the command") == to_json(stored, "a configuration")  # where tuples are lists
