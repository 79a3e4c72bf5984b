"""Runs in verl's environment: commands of rpg export through verl's own hydra config and its own checks.

stdin: {name: [override, …]}; stdout, last line: {name: {"config": …} or {"error": …}}. Of a command that does not name
an algorithm nothing but the values is looked at.
"""

import contextlib
import copy
import functools
import json
import sys
from pathlib import Path

READ = ("data", "actor_rollout_ref", "algorithm", "reward", "trainer", "rollout", "async_training")
SYNCHRONOUS = ("trainer/config", "ppo_trainer")  # of verl: the folder and the file that a program begins with
ASYNCHRONOUS = ("experimental/fully_async_policy/config", "fully_async_ppo_trainer")


def main() -> None:
    commands = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = composed(commands)
    print(json.dumps(found))


def composed(commands: dict[str, list[str]]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for program in (SYNCHRONOUS, ASYNCHRONOUS):
        some = {name: line for name, line in commands.items() if is_asynchronous(line) == (program == ASYNCHRONOUS)}
        if some:
            found |= composed_for(*program, some)
    return found


def is_asynchronous(line: list[str]) -> bool:
    return any(one.startswith("async_training.") for one in line)


def composed_for(folder: str, file: str, commands: dict[str, list[str]]) -> dict[str, dict[str, object]]:
    import verl
    from hydra import compose, initialize_config_dir
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    found: dict[str, dict[str, object]] = {}
    parse = functools.cache(OverridesParser.create().parse_override)  # most are those of the command before
    with initialize_config_dir(config_dir=str(Path(verl.__file__).parent / folder), version_base=None):
        base = compose(config_name=file)  # 30 files, which take a second to read
        for number, (name, overrides) in enumerate(commands.items()):
            try:
                config = copy.deepcopy(base)
                ConfigLoaderImpl._apply_overrides_to_config([parse(one) for one in overrides], config)
                if number == 0:  # hydra's own way, from the start, is the same
                    assert config == compose(config_name=file, overrides=overrides)
                if any(one.startswith("algorithm.adv_estimator=") for one in overrides):
                    check(config)
                parts = [part for part in READ if part in config]
                found[name] = {"config": {part: OmegaConf.to_container(config[part]) for part in parts}}
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def check(config: object) -> None:
    """What verl's programs and its workers check of the settings before they load a model."""
    import verl.utils.config as settings
    import verl.utils.device as device
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.trainer.ppo.reward import resolve_reward_manager_cls
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    device.auto_set_device(config)
    settings.validate_config(config, need_reference_policy(config), need_critic(config))
    whole = config.actor_rollout_ref
    for section in (whole.rollout, config.algorithm):  # the actor's is among what validate_config checks
        settings.omega_conf_to_dataclass(section)
    resolve_reward_manager_cls(config)
    get_policy_loss_fn(whole.actor.policy_loss.loss_mode)
    get_adv_estimator_fn(config.algorithm.adv_estimator)


if __name__ == "__main__":
    main()
