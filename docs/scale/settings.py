"""The settings of verl 0.9 that follow from a plan."""

from __future__ import annotations

from math import ceil

from schedule import RESERVED, Plan


def overrides(plan: Plan, model: str, preset: str = "rpg-reinforce-urkl") -> list[str]:
    """For ``python -m verl.trainer.main_ppo``. Data, reward and logging are the user's.

    What verl counts: rows (max_num_seqs) for each data-parallel rank of an engine; the learning rate's steps once a
    step together, once an optimiser step apart; a response's age from when its prompt was handed out, itself included.
    """
    training, engine, job = plan.training, plan.rollout, plan.rollout.job
    layout, device = training.layout, training.device
    apart = plan.how != "together"
    slots = engine.gpus // engine.tensor * engine.slots / job.samples  # of all engines, in prompts
    ahead = ceil(slots / job.prompts) if plan.how == "streaming" else 1  # batches begun before the first step
    beside = int((RESERVED - layout.state(training.model) / device.memory) * 20) / 20  # the trainer's state stays
    actor, rollout, correction = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
    text = f"""
        actor_rollout_ref.model.path={model}
        actor_rollout_ref.model.use_remove_padding=True
        actor_rollout_ref.model.enable_gradient_checkpointing=True
        actor_rollout_ref.model.use_fused_kernels=True
        data.train_batch_size={job.prompts}
        data.max_response_length={job.lengths.limit}
        {rollout}.name=vllm
        {rollout}.n={job.samples}
        {rollout}.temperature=1.0
        {rollout}.calculate_log_probs=True
        {rollout}.tensor_model_parallel_size={engine.split}
        {rollout}.max_num_seqs={max(1, engine.slots * engine.split // engine.tensor)}
        {rollout}.gpu_memory_utilization={RESERVED if apart else beside}
        {actor}.ppo_mini_batch_size={job.minibatch}
        {actor}.use_dynamic_bsz=True
        {actor}.ppo_max_token_len_per_gpu={layout.tokens(training.model, device)}
        {actor}.optim.lr=1e-6
        {actor}.optim.weight_decay=0.1
        {actor}.optim.lr_warmup_steps={10 * job.optimiser_steps if apart else 10}
        {actor}.policy_loss.loss_mode={preset}
        +{actor}.policy_loss.rpg.beta=1e-4
        algorithm.adv_estimator=rpg:{preset}
        algorithm.filter_groups.enable=True
        algorithm.filter_groups.metric=reward
        {correction}.rollout_is=token
        {correction}.rollout_is_threshold=2.0
        {correction}.bypass_mode=False
        trainer.nnodes={layout.gpus // 8}
        trainer.n_gpus_per_node=8
        trainer.total_training_steps={job.steps}
    """
    if layout.shard is not None:
        text += f"""
        {actor}.strategy=fsdp2
        {actor}.fsdp_config.fsdp_size={layout.shard}
        {actor}.fsdp_config.ulysses_sequence_parallel_size={layout.sequence}
        """
    else:
        transformer = f"{actor}.megatron.override_transformer_config"
        text += f"""
        model_engine=megatron
        actor_rollout_ref.model.fused_kernel_options.impl_backend=triton
        {actor}.megatron.expert_model_parallel_size={layout.expert}
        {actor}.megatron.pipeline_model_parallel_size={layout.pipeline}
        {actor}.megatron.context_parallel_size={layout.sequence}
        {transformer}.recompute_granularity=full
        {transformer}.recompute_method=uniform
        {transformer}.recompute_num_layers=1
        {actor}.megatron.router_replay.mode=R3
        {rollout}.enable_rollout_routing_replay=True
        {rollout}.data_parallel_size={engine.tensor // engine.split}
        {rollout}.expert_parallel_size={engine.tensor}
        """
        if training.model.layers % layout.pipeline:  # embedding and head count as a layer each: 96 instead of 94
            text += f"""
            +{transformer}.account_for_embedding_in_pipeline_split=True
            +{transformer}.account_for_loss_in_pipeline_split=True
            """
    if apart:
        waiting = ((ahead + 1) * job.prompts - slots) * job.kept / job.prompts  # steps until a slot is free, at most
        text += f"""
        trainer.v1.trainer_mode=separate_async
        trainer.v1.separate_async.parameter_sync_step={job.optimiser_steps}
        trainer.v1.separate_async.num_warmup_batches={ahead}
        trainer.v1.sampler.max_off_policy_threshold={ceil(plan.lag(engine.longest, 1) + max(0.0, waiting)) + 1}
        actor_rollout_ref.hybrid_engine=False
        {rollout}.checkpoint_engine.backend=nccl
        {rollout}.nnodes={engine.gpus // 8}
        """
    elif slots > job.prompts:  # verl begins one batch, and replaces groups while no more are in flight than this
        text += f"""
        algorithm.filter_groups.max_inflight_gen_batches={ceil(min(slots, job.sampled / job.samples) / job.prompts)}
        """
    return text.split()
