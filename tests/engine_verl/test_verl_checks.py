"""A whole run's settings: what the driver refuses in one line, before verl makes anything of them, and its remarks."""

import re

import pytest

from engine_verl.verl_engine import needs_verl, overrides_of, run_config
from integrations.equivalence import Case
from rpg.integrations.verl.checks import remarks
from rpg.integrations.verl.losses import settings_of

pytestmark = needs_verl

ACTOR = "actor_rollout_ref.actor"
MODE, FILTER = f"{ACTOR}.policy_loss.loss_mode", "algorithm.filter_groups"
BYPASS, ASYNC = "algorithm.rollout_correction.bypass_mode=True", "trainer.v1.trainer_mode=separate_async"
FULLY_ASYNC = "+async_training.staleness_threshold=0.5"
ASYNCHRONOUS = [ASYNC, "trainer.v1.trainer_mode=colocate_async", FULLY_ASYNC, "+rollout.nnodes=1"]
DRAWN_FROM = "set algorithm.rollout_correction.bypass_mode=True (old is what each token was drawn from)"
NO_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=False"


@pytest.mark.parametrize(
    ("case", "more", "line"),
    [
        (Case("grpo"), [f"{ACTOR}.use_kl_loss=False"], f"set {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0"),
        (Case("grpo"), [f"{ACTOR}.kl_loss_coef=0.1"], f"{ACTOR}.kl_loss_coef=0 keeps verl's from being added"),
        (Case("rpg-urkl"), [f"{ACTOR}.use_kl_loss=True"], "has a KL term of its own, anchored at the sampling policy"),
        (Case("rpg-urkl"), ["algorithm.use_kl_in_reward=True"], "set algorithm.use_kl_in_reward=False"),
        (Case("reinforce++"), ["algorithm.kl_ctrl.kl_coef=0.1"], "algorithm.kl_ctrl.kl_coef=0.01"),
        (Case("dapo"), [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"], "policy_loss.rpg.reduction=seq-mean-token-sum"),
        (Case("dr-grpo", {"constant": 7.0}), [f"{ACTOR}.loss_scale_factor=8"], "differ: give one"),
        (Case("remax"), ["trainer.use_v1=True"], "set trainer.use_v1=False algorithm.adv_estimator=remax"),
        (
            Case("dapo", {"mismatch": "tis"}),
            ["actor_rollout_ref.rollout.calculate_log_probs=False"],
            "needs the sampler's log-probabilities",
        ),
        (Case("dapo", {"mismatch": "tis"}), ["+algorithm.rollout_correction.rollout_is=token"], "the same thing twice"),
        (Case("dapo", {"high": 0.3}), [f"{ACTOR}.policy_loss.loss_mode=vanilla"], "vanilla is no preset of rpg"),
        (Case("dapo"), [BYPASS, "algorithm.rollout_correction.rollout_is=token"], "rollout_is is ignored by verl in"),
        (Case("dapo"), [BYPASS, "algorithm.rollout_correction.rollout_rs=token_k1"], "rollout_rs is ignored by verl"),
        (Case("dapo"), ["trainer.use_v1=False"], "filter_groups is ignored by verl's old trainer"),
        (Case("dapo"), [FULLY_ASYNC, BYPASS], "filter_groups is ignored by verl's old trainer and by its experimental"),
        (Case("grpo", reference="every"), [ASYNC, BYPASS], "frozen, or trainer_mode to sync"),
        (Case("grpo", reference="kl"), [FULLY_ASYNC, BYPASS], "frozen, or trainer_mode to sync"),
        (Case("grpo", reference="kl"), ["actor_rollout_ref.model.lora_rank=8"], "with LoRA verl's reference"),
        (Case("dapo"), [f"{MODE}=rpg-reinforce-urlk"], f"unknown {MODE} 'rpg-reinforce-urlk'. Did you mean 'rpg-rein"),
        (Case("dapo"), [f"{MODE}=rpg:nosuch"], f"unknown {MODE} 'rpg:nosuch'"),
        (Case("dapo"), [f"{MODE}=rpg"], f"unknown {MODE} 'rpg'"),
        (Case("dapo"), [f"{MODE}=gsop"], "Did you mean 'gspo'"),
        (Case("dapo"), [f"{MODE}=capo"], "capo cannot run inside verl"),
        (Case("dapo"), [f"{MODE}=otb"], "otb cannot run inside verl: its baseline needs Σπ²"),
        (Case("dapo"), [f"+{ACTOR}.policy_loss.rpg.advantage.knd=none"], "Did you mean 'kind'"),
        (Case("dapo"), ["algorithm.adv_estimator=rpg:leave-one"], "Did you mean 'rpg:leave-one-out'"),
        (Case("dapo"), ["algorithm.adv_estimator=dapo"], "Did you mean 'rpg:dapo'"),
        (Case("dapo"), [f"+{ACTOR}.policy_loss.rpg=foo"], "policy_loss.rpg is a section"),
        (Case("dapo"), [f"+{ACTOR}.policy_loss.rpg=[1]"], "policy_loss.rpg is a section"),
        (Case("dapo"), [f"+{ACTOR}.policy_loss.rpg.high=true"], "high must be a number; got True"),
        (Case("dapo"), [f"+{ACTOR}.policy_loss.rpg.hihg=0.3"], "Did you mean 'high'"),
    ],
)
def test_a_run_that_contradicts_its_preset_is_refused(case, more, line):
    with pytest.raises(ValueError, match=re.escape(line)) as raised:
        run_config([*overrides_of(case), *more])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_responses_of_earlier_weights_need_what_they_were_drawn_from(mode):
    weights = [f"+{ACTOR}.policy_loss.rpg.mismatch=exact"], ["algorithm.rollout_correction.rollout_is=token"], [BYPASS]
    for enough in weights:
        run_config([*overrides_of(Case("sapo")), mode, *enough])
    run_config([*overrides_of(Case("rloo", {"mismatch": "exact"})), mode])
    with pytest.raises(ValueError, match=r"rloo has no ratio .*bypass_mode=False \+.*mismatch=exact"):
        run_config([*overrides_of(Case("rloo")), mode, BYPASS])
    run_config([f"{MODE}=vanilla", mode])  # a loss of verl's own is left to verl
    mask = f"+{ACTOR}.policy_loss.rpg.mismatch=sequence-mask"  # drops responses, and weighs none
    for more, line in (([], DRAWN_FROM), ([mask], DRAWN_FROM), ([BYPASS, NO_LOG_PROBS], "calculate_log_probs=True")):
        with pytest.raises(ValueError, match=re.escape(line)) as raised:
            run_config([*overrides_of(Case("sapo")), mode, *more])
        assert "\n" not in str(raised.value)


def test_names_that_a_workers_own_code_may_register_are_left_to_verl():
    own = [f"{MODE}=my_loss", "algorithm.adv_estimator=my_estimator"]
    run_config(own)
    with pytest.raises(ValueError, match="Did you mean 'gspo'"):
        run_config([f"{MODE}=gspo2"])
    run_config([f"{MODE}=gspo2", "actor_rollout_ref.model.external_lib=mine"])


PENALTY = "+reward.reward_kwargs.overlong_buffer_cfg.enable=True"


@pytest.mark.parametrize(
    ("case", "more", "line"),
    [
        (Case("sapo"), [f"{ACTOR}.clip_ratio_high=0.28"], f"{ACTOR}.clip_ratio_high=0.28 has no effect on sapo"),
        (Case("sapo"), [f"{ACTOR}.clip_ratio_c=10"], "clip_ratio_c=10 has no effect on sapo"),
        (Case("ppo"), [], "ppo: there is no critic"),
        (Case("topr"), [], "topr: it is for rewards of -1 … 1"),
        (Case("topr", {"advantage": {"reward_range": [0, 1]}}), [], "rewards of 0 … 1 are mapped to -1 … 1"),
        (Case("gpg"), [], "more sampled where few groups have signal"),
        (Case("dapo"), [PENALTY, f"{FILTER}.metric=reward"], "metric=acc (correctness) and signal (the score) do not"),
        (Case("dapo"), [PENALTY, f"{FILTER}.enable=False"], f"{FILTER}.metric=acc (where the reward function gives"),
        (Case("dapo"), [PENALTY, f"{FILTER}.enable=False", "trainer.use_v1=False"], "trainer.use_v1=True only"),
        (Case("dapo"), [f"{FILTER}.metric=signal"], "an overlong penalty, which is off"),
        (Case("sapo", reference="every"), [], "reference.update=every has no effect"),
        (Case("sapo"), ["actor_rollout_ref.rollout.top_p=0.9"], "rollout.top_p=0.9: the loss compares the whole"),
    ],
)
def test_what_is_seldom_meant_is_remarked_upon(case, more, line):
    config = run_config([*overrides_of(case), *more])
    found = list(remarks(settings_of(config.actor_rollout_ref.actor), config))
    assert len(found) == 1
    assert line in found[0]


def test_a_run_as_published_goes_without_remarks():
    for metric in ("acc", "signal"):
        config = run_config([*overrides_of(Case("dapo")), PENALTY, f"{FILTER}.metric={metric}"])
        assert not list(remarks(settings_of(config.actor_rollout_ref.actor), config))


def test_the_loss_alone_brings_its_advantage_and_needs_no_critic():
    from verl.trainer.ppo.utils import need_critic

    for mode, estimator in {"rpg-reinforce-urkl": "rpg:rpg-reinforce-urkl", "rpg:sapo": "rpg:sapo"}.items():
        config = run_config([f"{MODE}={mode}"])
        assert (config.algorithm.adv_estimator, config.critic.enable, need_critic(config)) == (estimator, False, False)
    assert run_config([f"{MODE}=rpg:sapo", "algorithm.adv_estimator=grpo"]).algorithm.adv_estimator == "grpo"
    asked = run_config([f"{MODE}=rpg:ppo", "critic.enable=True"])
    assert (asked.algorithm.adv_estimator, asked.critic.enable) == ("gae", True), "a critic that is asked for stays"
    assert run_config([f"{MODE}=vanilla"]).algorithm.adv_estimator == "gae", "verl's own are left alone"
    config = run_config([f"{MODE}=rpg-reinforce-urkl"])
    found = list(remarks(settings_of(config.actor_rollout_ref.actor), config))
    assert [re.search("dynamic sampling|overlong penalty", line)[0] for line in found] == [
        "dynamic sampling",
        "overlong penalty",
    ]


def test_dr_grpo_divides_by_the_longest_response_unless_told_otherwise():
    longest = run_config([*overrides_of(Case("dr-grpo")), f"{ACTOR}.loss_scale_factor=null"])
    assert longest.actor_rollout_ref.actor.loss_scale_factor == longest.data.max_response_length
    same = ["data.max_response_length=99", f"{ACTOR}.loss_scale_factor=null"]
    named = run_config([*overrides_of(Case("dr-grpo", {"constant": "longest"})), *same])
    assert named.actor_rollout_ref.actor.loss_scale_factor == 99
